"""Running a command's coroutine: the event loop, and Ctrl-C and SIGTERM within it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")

INTERRUPTED = 130
TERMINATED = 143
"""Exit codes after Ctrl-C and SIGTERM, as shells have them."""


class Terminated(KeyboardInterrupt):
    """SIGTERM came: what Ctrl-C is at a terminal, from a supervisor or a shell's ``kill``."""


def run(coro: Coroutine[Any, Any, T]) -> T:
    """Run ``coro`` on uvloop, or on asyncio's own loop where there is none (Windows).

    Ctrl-C cancels it, and raises ``KeyboardInterrupt`` when it has cleaned up. SIGTERM does the
    same with ``Terminated``. A second signal does not wait for the cleaning up.
    """
    terminable = _Terminable()
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            return runner.run(terminable.run(coro))
    except asyncio.CancelledError:
        if terminable.came:
            raise Terminated from None
        raise
    finally:
        coro.close()  # a signal may have come before its first line


def terminate(number: int, frame: FrameType | None) -> NoReturn:
    """A handler for SIGTERM outside of ``run``: raises ``Terminated`` wherever the program is."""
    raise Terminated


class _Terminable:
    """A coroutine that SIGTERM cancels, as asyncio's runner has it for Ctrl-C.

    Attributes:
        came: whether there was a SIGTERM.
    """

    def __init__(self) -> None:
        self.came = False

    async def run(self, coro: Coroutine[Any, Any, T]) -> T:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def cancel(number: int, frame: FrameType | None) -> None:
            if self.came:
                raise Terminated
            self.came = True
            task.cancel()
            loop.call_soon_threadsafe(lambda: None)  # wakes it

        try:
            outer = signal.signal(signal.SIGTERM, cancel)
        except ValueError:  # not the main thread
            return await coro
        try:
            return await coro
        finally:
            signal.signal(signal.SIGTERM, outer)


@contextmanager
def on_interrupt(callback: Callable[[], object]) -> Iterator[None]:
    """Within the block Ctrl-C calls ``callback`` on the running event loop, and does nothing else.

    On Windows, whose event loops take no signal handlers, Ctrl-C stays as ``run`` has it.
    """
    loop = asyncio.get_running_loop()
    outer = signal.getsignal(signal.SIGINT)
    try:
        loop.add_signal_handler(signal.SIGINT, callback)
    except (NotImplementedError, ValueError, RuntimeError):  # Windows; not the main thread
        yield
        return
    try:
        yield
    finally:
        # Removing sets Python's default handler, and not the one that the runner had set.
        loop.remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, outer)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        from uvloop import new_event_loop
    except ImportError:
        return None
    return new_event_loop
