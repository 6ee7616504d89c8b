"""A small ASGI app around an engine, and uvicorn serving it on the running event loop."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, MutableMapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import click

from aiosched.engine import Engine
from aiosched.errors import InvalidRequest
from aiosched.params import SamplingParams

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

PLAIN, EVENTS = b"text/plain; charset=utf-8", b"text/event-stream"


class App:
    """``/ping`` answers at once, ``/stream`` streams, ``/complete`` answers whole or refuses.

    Prompts are the bodies of the requests.
    """

    def __init__(self, engine: Engine, params: SamplingParams) -> None:
        self._engine = engine
        self._params = params

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http"
        prompt = await _body(receive)
        if scope["path"] == "/ping":
            await _answer(send, 200, "pong")
        elif scope["path"] == "/stream":
            await self._stream(prompt, receive, send)
        else:
            await self._complete(prompt, send)

    async def _stream(self, prompt: str, receive: Receive, send: Send) -> None:
        stream = self._engine.generate(prompt, self._params)
        gone = asyncio.create_task(_until_gone(receive, stream.abort))
        try:
            async with stream:
                await _begin(send, 200, [(b"content-type", EVENTS)])
                async for token in stream:
                    if token.text:
                        event = f"data: {token.text!r}\n\n".encode()
                        await send({"type": "http.response.body", "body": event, "more_body": True})
                await send({"type": "http.response.body"})
        finally:
            gone.cancel()

    async def _complete(self, prompt: str, send: Send) -> None:
        try:
            completion = await self._engine.complete(prompt, self._params)
        except InvalidRequest as error:
            await _answer(send, 413, f"{type(error).__name__}: {error}")
        else:
            await _answer(send, 200, completion.text)


@asynccontextmanager
async def serving(app: App) -> AsyncIterator[int]:
    """Serve ``app`` on a free port of this machine, in the running loop; gives the port."""
    try:
        import uvicorn
    except ImportError:
        raise click.ClickException(
            "bench lag serves HTTP: pip install 'aiosched-engine[web]'"
        ) from None
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        config = uvicorn.Config(
            app, lifespan="off", ws="none", log_config=None, timeout_graceful_shutdown=5
        )

        class Server(uvicorn.Server):
            @contextmanager
            def capture_signals(self) -> Iterator[None]:
                yield  # Ctrl-C is the command's

        server = Server(config)
        task = asyncio.create_task(server.serve([listener]))
        try:
            while not server.started and not task.done():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            await task


async def _body(receive: Receive) -> str:
    parts, more = [], True
    while more:
        message = await receive()
        parts.append(message.get("body", b""))
        more = message.get("more_body", False)
    return b"".join(parts).decode(errors="replace")


async def _begin(send: Send, status: int, headers: list[tuple[bytes, bytes]]) -> None:
    await send({"type": "http.response.start", "status": status, "headers": headers})


async def _answer(send: Send, status: int, text: str) -> None:
    body = text.encode()
    length = str(len(body)).encode()
    await _begin(send, status, [(b"content-type", PLAIN), (b"content-length", length)])
    await send({"type": "http.response.body", "body": body})


async def _until_gone(receive: Receive, then: Callable[[], object]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    then()
