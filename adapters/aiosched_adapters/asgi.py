"""A client that goes away ends its request: helpers for handlers on any ASGI server.

No ASGI server cancels a plain handler when its client goes, and Starlette notices a departed reader
of a stream only at the next write on servers that implement ASGI 2.4. Here a task waits for the
server's ``http.disconnect`` beside the answer, and aborts the request when it comes. It reads the
same ``receive`` channel that the body comes by, so read the body first (FastAPI has).

``request`` below is a Starlette or FastAPI ``Request``, or a bare ASGI ``receive``.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import asynccontextmanager
from typing import Any, Protocol, TypeAlias

import msgspec

from aiosched.errors import AioschedError
from aiosched.observe.logs import get_logger
from aiosched.request import Completion, Token
from aiosched.stream import TokenStream

__all__ = ["abort_on_disconnect", "stream_events", "stream_text"]

log = get_logger("aiosched.asgi")

Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]


class HasReceive(Protocol):
    """A request that knows its ASGI ``receive``."""

    @property
    def receive(self) -> Receive: ...


async def abort_on_disconnect(request: HasReceive | Receive, stream: TokenStream) -> Completion:
    """The whole answer, unless the client goes away first.

    ::

        completion = await abort_on_disconnect(request, engine.generate(prompt))

    When it goes the request is aborted, and what there is of the answer is returned with the finish
    reason ``abort``: the handler needs no second path, since nobody reads its response. Where the
    answer is used otherwise, ``completion.raise_for_finish()`` makes an error of it.

    Raises what awaiting ``stream`` raises. If the call is cancelled, the request is aborted.
    """
    async with _watched(request, stream):
        return await stream


async def stream_text(
    request: HasReceive | Receive, stream: TokenStream
) -> AsyncGenerator[str, None]:
    """The text of an answer as it is generated, for a ``StreamingResponse``.

    An error of the request is raised, upon which the server cuts the body short. Meant for one
    choice: the texts of several would be mixed.
    """
    async with _watched(request, stream):
        async for token in stream:
            if token.text:
                yield token.text


async def stream_events(
    request: HasReceive | Receive, stream: TokenStream
) -> AsyncGenerator[bytes, None]:
    """An answer as server-sent events, for a ``StreamingResponse`` of type ``text/event-stream``.

    Each event is a JSON object with ``text`` and ``choice``; the last of a choice has a
    ``finish_reason``. An error of the request, or of the engine, is a last event of type ``error``
    with the fields ``error`` (its class) and ``message``.
    """
    async with _watched(request, stream):
        try:
            async for token in stream:
                if token.text or token.finish_reason is not None:
                    yield _event(token)
        except AioschedError as error:
            data = msgspec.json.encode({"error": type(error).__name__, "message": str(error)})
            yield b"event: error\ndata: " + data + b"\n\n"


@asynccontextmanager
async def _watched(request: HasReceive | Receive, stream: TokenStream) -> AsyncIterator[None]:
    """Abort ``stream`` when the client goes, and when the block is left in whatever way."""
    receive = request if callable(request) else request.receive
    watcher = asyncio.create_task(_abort_when_gone(receive, stream), name="aiosched-disconnect")
    try:
        async with stream:
            yield
    finally:
        # Waited for: the server must not find somebody in ``receive`` when the response is done.
        watcher.cancel()
        await asyncio.wait((watcher,))
        failure = None if watcher.cancelled() else watcher.exception()
    if failure is not None:
        raise failure


async def _abort_when_gone(receive: Receive, stream: TokenStream) -> None:
    body_complete = False
    try:
        while (message := await receive())["type"] != "http.disconnect":
            if body_complete:
                # It would give the same for ever, without once letting the event loop run.
                log.warning("a middleware replays the request body: disconnects cannot be seen")
                return
            body_complete = not message.get("more_body", False)
    except Exception:
        stream.abort()  # nobody watches any more, so nobody may wait either
        raise
    stream.abort()


def _event(token: Token) -> bytes:
    fields: dict[str, Any] = {"text": token.text, "choice": token.choice}
    if token.finish_reason is not None:
        fields["finish_reason"] = token.finish_reason
    return b"data: " + msgspec.json.encode(fields) + b"\n\n"
