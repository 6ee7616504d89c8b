"""Reader: the mailbox slot of a stream, and what its one reader waits on.

A step wakes as many tasks as it has streams, so what waking one costs is most of what the host does
in a step. A new ``asyncio.Future`` for each token would be four objects that the garbage collector
tracks (future, callback, handle, the waiting coroutine), thousands of which come and go with every
step and set it off each time. asyncio's tasks wait on anything that keeps the protocol of a future,
so here each stream has one such object for all of its tokens, and the readers of a step are woken
by one callback of the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Sequence
from contextvars import Context

from aiosched.errors import AioschedError


class Reader:
    """What the reader of a stream awaits: the next token, or with ``whole`` the end.

    Waking says only that there may be something; the reader looks itself. A wake-up while nobody
    waits is not kept.

    Args:
        loop: the engine's event loop; without one nobody can wait.

    Attributes:
        whole: who waits next wants the whole answer: single tokens do not wake it.
        on_token, on_end: the callback of the task that waits, if one does.
        context: the context of that task.
    """

    __slots__ = (
        "_asyncio_future_blocking",
        "_busy",
        "_cancelled",
        "_loop",
        "_message",
        "context",
        "on_end",
        "on_token",
        "whole",
    )

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._asyncio_future_blocking = False
        self._loop = loop
        self._busy = False
        self._cancelled = False
        self._message: object = None
        self.whole = False
        self.on_token: Callable[[Reader], object] | None = None
        self.on_end: Callable[[Reader], object] | None = None
        self.context: Context | None = None

    def __await__(self) -> Generator[Reader, None, None]:
        if self._busy:
            raise AioschedError("another task is reading this stream")
        self._busy = True
        self._asyncio_future_blocking = True  # asyncio's sign that this was awaited, not yielded
        try:
            yield self
        finally:
            self._busy = False

    def token(self) -> None:
        """There are tokens to read. On the event loop."""
        callback = self.on_token
        if callback is not None:
            self.on_token = None
            self._call_soon(callback)

    def notify(self) -> None:
        """There is an end to read. On the event loop."""
        self.token()
        callback = self.on_end
        if callback is not None:
            self.on_end = None
            self._call_soon(callback)

    # What asyncio asks of a future that a task waits on.

    def get_loop(self) -> asyncio.AbstractEventLoop | None:
        return self._loop

    def add_done_callback(
        self, callback: Callable[[Reader], object], *, context: Context | None = None
    ) -> None:
        self.context = context
        if self.whole:
            self.on_end = callback
        else:
            self.on_token = callback

    def cancel(self, msg: object = None) -> bool:
        """The task is cancelled. False if it was woken already: then it is told when it runs."""
        callback = self.on_token or self.on_end
        if callback is None:
            return False
        self.on_token = self.on_end = None
        self._cancelled, self._message = True, msg
        self._call_soon(callback)
        return True

    def result(self) -> None:
        if self._cancelled:
            self._cancelled = False
            message, self._message = self._message, None
            raise asyncio.CancelledError(*(() if message is None else (message,)))

    def _call_soon(self, callback: Callable[[Reader], object]) -> None:
        context, self.context = self.context, None
        assert self._loop is not None  # somebody waits
        self._loop.call_soon(callback, self, context=context)


def wake(readers: Sequence[Reader]) -> None:
    """Tell those of ``readers`` that wait for a token. They run soon, in one callback of the loop.

    On the event loop.
    """
    waiting = [reader for reader in readers if reader.on_token is not None]
    if waiting:
        loop = waiting[0].get_loop()
        assert loop is not None
        loop.call_soon(_run, waiting)


def _run(waiting: list[Reader]) -> None:
    """Run the tasks of ``waiting``, but for those that were woken or cancelled meanwhile."""
    left = iter(waiting)
    try:
        for reader in left:
            callback, context = reader.on_token, reader.context
            if callback is not None and context is not None:
                reader.on_token = reader.context = None
                context.run(callback, reader)
    finally:
        # A task that raises KeyboardInterrupt or SystemExit must not leave the others asleep.
        for reader in left:
            reader.token()
