"""The example web app, on a real server with real clients."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from engines import small_engine
from fastapi import FastAPI, Request
from serving import letters, serving, until
from starlette.middleware.base import BaseHTTPMiddleware
from talking_model import Letters, TalkingModel

from aiosched import Engine, Status
from aiosched.device.sim import SimDevice
from aiosched.testing.hash_model import oracle

FILE = Path(__file__).parents[2] / "examples" / "fastapi_app.py"


def example() -> Any:
    spec = importlib.util.spec_from_file_location("fastapi_app", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


EXAMPLE = example()


async def pass_on(request: Request, call_next: Any) -> Any:
    return await call_next(request)


def build_app(engine: Engine, *, wrapped: bool = False) -> FastAPI:
    app: FastAPI = EXAMPLE.build_app(engine)
    if wrapped:
        app.add_middleware(BaseHTTPMiddleware, dispatch=pass_on)
    return app


def held_engine(step: int, **settings: Any) -> tuple[Engine, SimDevice]:
    device = SimDevice()
    device.hold(step, "forward")
    return small_engine(TalkingModel(), device, **settings), device


def ask(prompt: str = "hello", max_tokens: int = 6) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0.0}


async def events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    async for line in response.aiter_lines():
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))


def at_baseline(engine: Engine) -> bool:
    stats = engine.stats()
    pages = stats.kv_pages_free + stats.kv_pages_cached
    return stats.running + stats.paused + stats.waiting == 0 and pages == stats.kv_pages_total


@pytest.mark.parametrize("wrapped", [False, True])
def test_text_reaches_the_client_as_it_is_generated(run, wrapped):
    async def main() -> None:
        engine, device = held_engine(3)
        async with (
            serving(build_app(engine, wrapped=wrapped)) as (_, client),
            client.stream("POST", "/stream", json=ask()) as response,
        ):
            assert response.headers["content-type"].startswith("text/event-stream")
            got = events(response)
            early = [(await anext(got))["text"] for _ in range(2)]
            assert early == list(letters("hello", 2))  # step 3 is still held
            device.release()
            late = [event async for event in got]
            assert "".join([*early, *(event["text"] for event in late)]) == letters("hello", 6)
            assert late[-1]["finish_reason"] == "length"

    run(main())


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("path", ["/stream", "/complete"])
def test_nothing_runs_for_a_client_that_went_away(run, path, wrapped):  # C91
    async def main() -> None:
        engine, device = held_engine(4, reader_grace=1e6)
        async with serving(build_app(engine, wrapped=wrapped)) as (server, client):
            request = asyncio.create_task(client.post(path, json=ask(max_tokens=500)))
            await device.reached(4)
            await until(lambda: engine.stats().steps == 3)
            launched = max(record.step for record in device.trace)
            request.cancel()  # closes the socket
            await until(lambda: not server.server_state.tasks)  # the handler has ended
            device.release()
            await until(lambda: at_baseline(engine))
            assert max(record.step for record in device.trace) == launched
            assert engine.stats().finished == {"abort": 1}

    run(main())


def test_64_clients_at_once_get_their_own_answers(run):
    async def main() -> None:
        engine = small_engine(TalkingModel(), kv_tokens=4096)
        async with serving(build_app(engine)) as (_, client):

            async def complete(prompt: str) -> str:
                return (await client.post("/complete", json=ask(prompt))).json()["text"]

            async def stream(prompt: str) -> str:
                async with client.stream("POST", "/stream", json=ask(prompt)) as response:
                    return "".join([event["text"] async for event in events(response)])

            prompts = [f"client {number}" for number in range(64)]
            answers = await asyncio.gather(
                *((stream if i % 2 else complete)(prompt) for i, prompt in enumerate(prompts))
            )
            assert answers == [letters(prompt, 6) for prompt in prompts]
            await until(lambda: at_baseline(engine))

    run(main())


def test_ping_answers_while_the_device_is_busy(run):
    async def main() -> None:
        engine, device = held_engine(2)
        async with serving(build_app(engine)) as (_, client):
            request = asyncio.create_task(client.post("/complete", json=ask()))
            await device.reached(2)
            for _ in range(8):
                assert (await client.get("/ping")).json() == {"status": "ok"}
            assert not request.done()
            device.release()
            assert (await request).json() == {
                "text": letters("hello", 6),
                "finish_reason": "length",
            }

    run(main())


def test_an_error_in_mid_stream_is_the_last_event(run):  # C93
    async def main() -> None:
        faulty = oracle(Letters().encode("hello"), 3)[2]
        engine = small_engine(TalkingModel(faulty=faulty))
        async with serving(build_app(engine)) as (_, client):
            async with client.stream("POST", "/stream", json=ask(max_tokens=9)) as response:
                *tokens, last = [event async for event in events(response)]
            assert "".join(event["text"] for event in tokens) == letters("hello", 3)
            assert last["error"] == "InvalidModelOutput"
            assert (await client.post("/complete", json=ask(max_tokens=9))).status_code == 503
            assert (await client.get("/ping")).json() == {"status": "ok"}

    run(main())


@pytest.mark.parametrize("path", ["/stream", "/complete"])
def test_what_cannot_be_served_is_refused_with_its_reason(run, path):
    async def main() -> None:
        async with serving(build_app(small_engine(TalkingModel()))) as (_, client):
            response = await client.post(path, json=ask(max_tokens=0))
            assert response.status_code == 422
            assert "max_tokens=0" in response.json()["error"]

    run(main())


def test_a_server_that_stops_lets_streams_end_in_its_grace_time(run):  # C93
    async def main() -> None:
        engine, device = held_engine(3)
        app = build_app(engine)
        async with (
            serving(app, timeout_graceful_shutdown=30) as (server, client),
            client.stream("POST", "/stream", json=ask()) as response,
        ):
            got = events(response)
            await anext(got)
            server.should_exit = True
            await until(lambda: not server.servers[0].is_serving())
            device.release()
            assert [event async for event in got][-1]["finish_reason"] == "length"
        assert engine.health().status is Status.CLOSED

    run(main())


def test_a_server_that_stops_cuts_streams_off_after_its_grace_time(run):  # C93
    async def main() -> None:
        engine, device = held_engine(3, reader_grace=1e6)
        app = build_app(engine)
        async with (
            serving(app, timeout_graceful_shutdown=0) as (server, client),
            client.stream("POST", "/stream", json=ask(max_tokens=500)) as response,
        ):
            got = events(response)
            await anext(got)
            server.should_exit = True
            with pytest.raises(httpx.RemoteProtocolError):
                [event async for event in got]
            device.release()
        assert engine.health().status is Status.CLOSED

    run(main())
