"""Running a command's coroutine: the event loop, and Ctrl-C within it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")


def run(coro: Coroutine[Any, Any, T]) -> T:
    """Run ``coro`` on uvloop, or on asyncio's own loop where there is none (Windows).

    Ctrl-C cancels it, and raises ``KeyboardInterrupt`` when it has cleaned up.
    """
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(coro)


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
