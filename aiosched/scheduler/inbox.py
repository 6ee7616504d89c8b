"""Inbox: what the world wants of the scheduler, and what wakes it when it sleeps."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable

from aiosched.scheduler.requests import Request


class Inbox:
    """Requests that arrived, were aborted, or whose reader reads again.

    ``submit`` and ``resume`` belong to the event loop. ``abort`` may be called from any thread and
    from a finalizer in the middle of anything, the scheduler included: it appends to a deque and
    wakes, and everything else happens at the next intake.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.arrivals: deque[Request] = deque()
        self.aborts: deque[Request] = deque()
        self.resumes: deque[Request] = deque()
        self.loop = loop
        self._thread = threading.get_ident()
        self._sleeper: asyncio.Future[None] | None = None

    def submit(self, request: Request) -> None:
        self.arrivals.append(request)
        self.wake()

    def resume(self, request: Request) -> None:
        self.resumes.append(request)
        self.wake()

    def abort(self, request: Request) -> None:
        self.aborts.append(request)
        self.tell(self.wake)

    def tell(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` on the event loop: now if this is its thread, else soon."""
        if threading.get_ident() == self._thread:
            callback()
            return
        # A loop that is closed runs nothing for anybody any more.
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(callback)

    def wake(self) -> None:
        """End ``sleep``, if the scheduler is in it. On the event loop."""
        sleeper = self._sleeper
        if sleeper is not None and not sleeper.done():
            sleeper.set_result(None)

    async def sleep(self) -> None:
        """Until something is put in. No timer runs and nothing is polled meanwhile."""
        # First the future, then the look: making one may collect garbage, and a finalizer that
        # aborts in between must find somebody to wake.
        sleeper = self._sleeper = self.loop.create_future()
        try:
            if not (self.arrivals or self.aborts or self.resumes):
                await sleeper
        finally:
            self._sleeper = None
