"""A client that goes away ends its request, whatever the handler waits for."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
from typing import Any

import pytest
from engines import greedy, small_engine
from serving import GONE, Client, baseline, letters, until
from starlette.requests import Request
from starlette.responses import StreamingResponse
from talking_model import Letters, TalkingModel

from aiosched import Engine, FinishReason, InvalidModelOutput
from aiosched.device.sim import SimDevice
from aiosched.testing.cancel import cancel_at
from aiosched.testing.hash_model import oracle
from aiosched_adapters.asgi import abort_on_disconnect, stream_events, stream_text

BODY = {"type": "http.request", "body": b"{}", "more_body": False}


def held_engine(step: int, **settings: Any) -> tuple[Engine, SimDevice]:
    """An engine whose device does not finish ``step`` before it is released."""
    device = SimDevice()
    device.hold(step, "forward")
    return small_engine(TalkingModel(), device, **settings), device


def last_step(device: SimDevice) -> int:
    return max((record.step for record in device.trace), default=0)


def events(parts: list[bytes]) -> list[dict[str, Any]]:
    return [json.loads(part.split(b"data: ")[1]) for part in parts]


def starlette_request(receive: Any) -> Request:
    return Request({"type": "http", "method": "POST", "headers": []}, receive)


@pytest.mark.parametrize("kind", ["request", "receive", "starlette"])
def test_a_client_that_stays_gets_the_whole_answer(run, kind):
    async def main() -> None:
        client = Client(BODY)
        source = {
            "request": client,
            "receive": client.receive,
            "starlette": starlette_request(client.receive),
        }[kind]
        async with small_engine(TalkingModel()) as engine:
            answer = await abort_on_disconnect(source, engine.generate("hello", greedy(6)))
            assert answer.text == letters("hello", 6)
            assert answer.finish_reason is FinishReason.LENGTH

    run(main())


def test_a_client_that_goes_ends_its_request_with_the_step_in_flight(vrun):  # C91
    async def main() -> None:
        engine, device = held_engine(4)
        async with engine:
            client = Client(BODY)
            task = asyncio.create_task(
                abort_on_disconnect(client, engine.generate("hello", greedy(50)))
            )
            await device.reached(4)
            await until(lambda: engine.stats().steps == 3)
            launched = last_step(device)
            client.leave()
            answer = await task  # does not wait for the device
            assert answer.finish_reason is FinishReason.ABORT
            assert answer.text == letters("hello", 3)
            device.release()
            await baseline(engine)
            assert last_step(device) == launched

    vrun(main())


def test_a_client_that_went_before_the_call_gets_nothing_run(vrun):
    async def main() -> None:
        device = SimDevice()
        async with small_engine(TalkingModel(), device) as engine:
            client = Client(GONE)
            answer = await abort_on_disconnect(client, engine.generate("hello", greedy(50)))
            assert answer.finish_reason is FinishReason.ABORT
            await baseline(engine)
            assert last_step(device) <= 2

    vrun(main())


def test_parts_of_the_body_are_passed_over(vrun):
    async def main() -> None:
        parts = [BODY | {"more_body": True}] * 3
        async with small_engine(TalkingModel()) as engine:
            stream = engine.generate("hello", greedy(3000))
            answer = await abort_on_disconnect(Client(*parts, BODY, GONE), stream)
            assert answer.finish_reason is FinishReason.ABORT

    vrun(main())


def test_a_replayed_body_is_not_read_for_ever(vrun, caplog):
    async def replay() -> dict[str, Any]:
        return BODY

    async def main() -> None:
        async with small_engine(TalkingModel()) as engine:
            answer = await abort_on_disconnect(replay, engine.generate("hello", greedy(6)))
            assert answer.text == letters("hello", 6)

    with caplog.at_level(logging.WARNING, "aiosched"):
        vrun(main())
    assert "replays" in caplog.text


def test_a_receive_that_fails_ends_the_request_and_says_why(vrun):
    async def broken() -> dict[str, Any]:
        raise OSError("the socket is gone")

    async def main() -> None:
        async with small_engine(TalkingModel()) as engine:
            with pytest.raises(OSError, match="socket is gone"):
                await abort_on_disconnect(broken, engine.generate("hello", greedy(3000)))
            await baseline(engine)

    vrun(main())


def test_an_error_of_the_request_passes_through(vrun):
    async def main() -> None:
        faulty = oracle(Letters().encode("hello"), 3)[2]
        async with small_engine(TalkingModel(faulty=faulty)) as engine:
            with pytest.raises(InvalidModelOutput):
                await abort_on_disconnect(Client(BODY), engine.generate("hello", greedy(9)))

    vrun(main())


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("helper", ["complete", "text", "events"])
def test_cancelled_anywhere_it_aborts_and_leaves_nothing(vrun, helper, late):  # C27
    async def handler(engine: Engine) -> None:
        stream = engine.generate("hello", greedy(4))
        if helper == "complete":
            await abort_on_disconnect(Client(BODY), stream)
            return
        parts = {"text": stream_text, "events": stream_events}[helper]
        async for _ in parts(Client(BODY), stream):
            await asyncio.sleep(0)

    async def main() -> None:
        async with small_engine(TalkingModel(), reader_grace=1e6) as engine:
            for n in itertools.count(1):
                outcome = await cancel_at(handler(engine), n, late=late)
                assert outcome.error is None
                await baseline(engine)
                if not outcome.reached:
                    break
                assert outcome.cancelled
            assert n > 2

    vrun(main())


def test_text_comes_as_it_is_generated(vrun):
    async def main() -> None:
        engine, device = held_engine(3)
        async with engine:
            text = stream_text(Client(BODY), engine.generate("hello", greedy(6)))
            assert [await anext(text), await anext(text)] == list(letters("hello", 2))
            device.release()
            rest = [part async for part in text]
            assert "".join(rest) == letters("hello", 6)[2:]

    vrun(main())


def test_a_streaming_client_that_goes_ends_its_stream(vrun):
    async def main() -> None:
        engine, device = held_engine(3, reader_grace=1e6)
        async with engine:
            client = Client(BODY)
            text = stream_text(client, engine.generate("hello", greedy(50)))
            await anext(text), await anext(text)
            client.leave()
            assert [part async for part in text] == []  # while the device still holds step 3
            device.release()
            await baseline(engine)

    vrun(main())


@pytest.mark.parametrize("read", [0, 1])
def test_a_dropped_generator_aborts_at_once(vrun, read):
    async def main() -> None:
        engine, device = held_engine(3, reader_grace=1e6)
        async with engine:
            text = stream_text(Client(BODY), engine.generate("hello", greedy(50)))
            for _ in range(read):
                await anext(text)
            del text
            device.release()
            await baseline(engine)

    vrun(main())


def test_events_carry_text_choice_and_the_reason_at_the_end(vrun):
    async def main() -> None:
        async with small_engine(TalkingModel()) as engine:
            stream = engine.generate("hello", greedy(3, n=2))
            got = events([part async for part in stream_events(Client(BODY), stream)])
        for choice in (0, 1):
            own = [event for event in got if event["choice"] == choice]
            assert "".join(event["text"] for event in own) == letters("hello", 3)
            assert [event.get("finish_reason") for event in own] == [None, None, "length"]

    vrun(main())


def test_an_error_is_the_last_event(vrun):  # C93
    async def main() -> None:
        faulty = oracle(Letters().encode("hello"), 3)[2]
        async with small_engine(TalkingModel(faulty=faulty)) as engine:
            stream = engine.generate("hello", greedy(9))
            parts = [part async for part in stream_events(Client(BODY), stream)]
        assert parts[-1].startswith(b"event: error\n")
        *tokens, error = events(parts)
        assert "".join(event["text"] for event in tokens) == letters("hello", 3)
        assert error["error"] == "InvalidModelOutput"

    vrun(main())


@pytest.mark.parametrize("spec_version", ["2.3", "2.4"])
def test_starlette_lets_go_of_a_stream_whose_client_went(vrun, spec_version):
    """On ASGI 2.4 Starlette does not listen: it would find out at its next write only."""

    async def main() -> None:
        engine, device = held_engine(3, reader_grace=1e6)
        async with engine:
            client = Client()
            text = stream_text(client, engine.generate("hello", greedy(50)))
            sent: list[Any] = []

            async def send(message: Any) -> None:
                sent.append(message)

            scope = {"type": "http", "asgi": {"spec_version": spec_version}}
            response = StreamingResponse(text)
            task = asyncio.create_task(response(scope, client.receive, send))
            await until(lambda: len(sent) == 3)
            client.leave()
            await task
            device.release()
            await baseline(engine)

    vrun(main())


def test_a_client_that_goes_while_a_write_is_held_up_is_seen(vrun):
    async def main() -> None:
        async with small_engine(TalkingModel(), reader_grace=1e6, max_unread_tokens=4) as engine:
            client = Client()
            text = stream_text(client, engine.generate("hello", greedy(50)))
            drained = asyncio.Event()
            writing = asyncio.Event()

            async def send(message: Any) -> None:
                if message.get("body"):
                    writing.set()
                    await drained.wait()

            scope = {"type": "http", "asgi": {"spec_version": "2.4"}}
            task = asyncio.create_task(StreamingResponse(text)(scope, client.receive, send))
            await writing.wait()
            await until(lambda: engine.stats().paused == 1)  # C92
            client.leave()
            await until(lambda: engine.stats().kv_pages_free + engine.stats().kv_pages_cached == 64)
            drained.set()
            await task
            await baseline(engine)

    vrun(main())
