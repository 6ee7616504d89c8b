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
import inspect
from collections.abc import Callable, Coroutine, Generator, Sequence
from contextvars import Context
from functools import partial
from itertools import repeat
from types import FunctionType
from typing import NoReturn, ParamSpec, TypeVar, cast

from aiosched.errors import AioschedError

P = ParamSpec("P")
T = TypeVar("T")

_nothing = repeat(None).__next__


class Reader:
    """What the reader of a stream awaits: the next token, or with ``whole`` the end.

    Waking says only that there may be something; the reader looks itself. A wake-up while nobody
    waits is not kept.

    A task that waits asks for ``get_loop`` and ``result`` once for each token. They are attributes
    that hold functions written in C: as methods in Python they were a tenth of what a token costs.

    Args:
        loop: the engine's event loop; without one nobody can wait.

    Attributes:
        busy: somebody waits, or was woken or cancelled and has not run yet: nobody else may wait.
        whole: who waits next wants the whole answer: single tokens do not wake it.
        on_token, on_end: the callback of the task that waits, if one does.
        context: the context of that task.
        get_loop: the engine's event loop.
        result: what the wait gives: ``None``, or it raises CancelledError.
    """

    __slots__ = (
        "_asyncio_future_blocking",
        "_loop",
        "busy",
        "context",
        "get_loop",
        "on_end",
        "on_token",
        "result",
        "whole",
    )

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._asyncio_future_blocking = False
        self._loop = loop
        self.busy = False
        self.get_loop: Callable[[], asyncio.AbstractEventLoop | None] = repeat(loop).__next__
        self.result: Callable[[], None] = _nothing
        self.whole = False
        self.on_token: Callable[[Reader], object] | None = None
        self.on_end: Callable[[Reader], object] | None = None
        self.context: Context | None = None

    def __await__(self) -> Generator[Reader, None, None]:
        if self.busy:
            self.refuse()
        self.busy = True
        self._asyncio_future_blocking = True  # asyncio's sign that this was awaited, not yielded
        try:
            yield self
        finally:
            self.busy = False

    def refuse(self) -> NoReturn:
        raise AioschedError("another task is reading this stream")

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
        self.result = partial(self._cancelled, msg)
        self._call_soon(callback)
        return True

    def _cancelled(self, message: object) -> None:
        self.result = _nothing  # whoever waits next is not cancelled
        raise asyncio.CancelledError(*(() if message is None else (message,)))

    def _call_soon(self, callback: Callable[[Reader], object]) -> None:
        context, self.context = self.context, None
        assert self._loop is not None  # somebody waits
        self._loop.call_soon(callback, self, context=context)


def coroutine_of_one_frame(
    function: Callable[P, Generator[Reader, None, T]],
) -> Callable[P, Coroutine[Reader, None, T]]:
    """Make ``function`` a coroutine function that gives readers to the event loop by ``yield``.

    ``async def`` must go through ``__await__``, a second frame that is made and thrown away for
    each wait: a tenth of what a token costs. ``types.coroutine`` avoids it by a flag of the code
    object, but what it makes is a generator, which ``asyncio.create_task`` refuses from Python
    3.12 on. So this sets the flag of ``async def`` itself. ``await x`` is
    ``yield from x.__await__()`` here.
    """
    made = cast(FunctionType, function)
    flags = made.__code__.co_flags & ~inspect.CO_GENERATOR | inspect.CO_COROUTINE
    made.__code__ = made.__code__.replace(co_flags=flags)
    return cast("Callable[P, Coroutine[Reader, None, T]]", made)


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
