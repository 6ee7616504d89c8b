"""One thread that waits for device events on behalf of the event loop.

The thread blocks in ``synchronize``, which drops the GIL, and tells the loop through an eventfd
that the loop watches like a socket. Python must never run in a CUDA host function instead: it
would wait for the GIL inside the driver, on the thread that every stream depends on.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Generic, Protocol, TypeVar

K = TypeVar("K")


class Waitable(Protocol):
    """What the thread needs of an event."""

    def synchronize(self) -> None:
        """Block until the event has fired."""


class EventWaiter(Generic[K]):
    """Calls ``on_fired(key, error)`` on the loop for each event, in the order of ``watch``.

    Events that fire out of that order are reported late, behind the one that is waited for.

    Args:
        loop: the event loop to report to.
        on_fired: ``error`` is what ``synchronize`` raised, if it did.
        prepare: runs first in the thread.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        on_fired: Callable[[K, Exception | None], None],
        prepare: Callable[[], None] = lambda: None,
    ) -> None:
        self._loop = loop
        self._on_fired = on_fired
        self._prepare = prepare
        self._queue: SimpleQueue[tuple[K, Waitable] | None] = SimpleQueue()
        self._fired: deque[tuple[K, Exception | None]] = deque()
        self._eventfd = -1  # not in use
        self._thread = threading.Thread(target=self._serve, name="aiosched-events", daemon=True)

    def start(self) -> None:
        """Start the thread. On the loop."""
        self._eventfd = _watched_eventfd(self._loop, self._signalled)
        self._thread.start()

    def watch(self, key: K, event: Waitable) -> None:
        """Report ``key`` when ``event`` has fired."""
        self._queue.put((key, event))

    def close(self, timeout: float) -> bool:
        """Stop after what is watched already; report what has fired. True if the thread ended.

        On the loop. A thread that is stuck in ``synchronize`` is left behind as a daemon.
        """
        if self._eventfd >= 0:
            with contextlib.suppress(RuntimeError):  # the loop is closed, its watches with it
                self._loop.remove_reader(self._eventfd)
        self._queue.put(None)
        self._thread.join(timeout)
        self._report()
        return not self._thread.is_alive()

    def _serve(self) -> None:
        try:
            self._prepare()
            while (watched := self._queue.get()) is not None:
                key, event = watched
                error = None
                try:
                    event.synchronize()
                except Exception as raised:
                    error = raised
                self._fired.append((key, error))
                self._signal()
                del watched, key, event, error  # an idle thread keeps nothing alive
        finally:
            if self._eventfd >= 0:  # closed by its only writer: the number cannot be reused early
                os.close(self._eventfd)

    def _signal(self) -> None:
        if self._eventfd >= 0:
            os.eventfd_write(self._eventfd, 1)
        else:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
                self._loop.call_soon_threadsafe(self._report)

    def _signalled(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._eventfd)
        self._report()

    def _report(self) -> None:
        while self._fired:
            self._on_fired(*self._fired.popleft())


def _watched_eventfd(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> int:
    """An eventfd that makes ``loop`` call back; -1 where there are none (macOS, Windows)."""
    if not hasattr(os, "eventfd"):
        return -1
    eventfd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    try:
        loop.add_reader(eventfd, callback)
    except NotImplementedError:
        os.close(eventfd)
        return -1
    return eventfd
