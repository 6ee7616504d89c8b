"""What tests of programs around the engine share: a real server, and what a model says."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import uvicorn
from talking_model import VOCAB, Letters

from aiosched import Engine
from aiosched.testing.hash_model import oracle

GONE = {"type": "http.disconnect"}


def letters(prompt: str, max_tokens: int) -> str:
    """The greedy answer of ``TalkingModel`` to ``prompt``."""
    tokenizer = Letters()
    return tokenizer.decode(oracle(tokenizer.encode(prompt), max_tokens, VOCAB))


@asynccontextmanager
async def serving(
    app: Any, **settings: Any
) -> AsyncIterator[tuple[uvicorn.Server, httpx.AsyncClient]]:
    """A uvicorn on this event loop with a port of its own, and a client of it."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    settings = {"timeout_graceful_shutdown": 5, "log_config": None, "ws": "none"} | settings
    config = uvicorn.Config(app, lifespan="on", **settings)
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    await until(lambda: server.started or task.done())
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    try:
        async with httpx.AsyncClient(base_url=url, limits=limits, trust_env=False) as client:
            yield server, client
    finally:
        server.should_exit = True
        await task
        listener.close()


async def until(condition: Callable[[], object], patience: float = 10.0) -> None:
    """Let the event loop turn until ``condition`` holds; fail after ``patience`` real seconds."""
    give_up = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < give_up, "it did not come to pass"
        await asyncio.sleep(0)


async def baseline(engine: Engine) -> None:
    """Until nothing of any request is left: no page, no place, no task but this and the engine's.

    The scheduler's turn that gives the last page back may still be to come.
    """

    def reached() -> bool:
        stats = engine.stats()
        pages = stats.kv_pages_free + stats.kv_pages_cached
        return (
            stats.running + stats.paused + stats.waiting == 0
            and pages == stats.kv_pages_total
            and len(asyncio.all_tasks()) == 2
        )

    await until(reached)


class Client:
    """The far end of an ASGI ``receive``."""

    def __init__(self, *messages: dict[str, Any]) -> None:
        self.queue: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        for message in messages:
            self.queue.put_nowait(message)

    @property
    def receive(self) -> Callable[[], Awaitable[dict[str, Any]]]:
        return self.queue.get

    def leave(self) -> None:
        self.queue.put_nowait(GONE)
