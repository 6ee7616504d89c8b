"""Watchdog: turns a device that never answers into an error that names the step."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from aiosched.errors import DeviceStalled


class Watchdog:
    """Watches the oldest step in flight. One timer, and none while nothing is in flight.

    After ``limit`` seconds the engine counts as stalled; after twice that ``on_failure`` gets the
    error. The timer is not moved with each step: when it fires it looks how old the oldest step is.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        limit: float,
        on_failure: Callable[[DeviceStalled], None],
        *,
        rank: int = 0,
    ) -> None:
        self.stalled = False
        self._loop = loop
        self._limit = limit
        self._on_failure = on_failure
        self._rank = rank
        self._in_flight: deque[tuple[int, float]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    def launched(self, step: int) -> None:
        self._in_flight.append((step, self._loop.time()))
        if self._timer is None:
            self._timer = self._loop.call_later(self._limit, self._look)

    def landed(self) -> None:
        """The oldest step has answered."""
        self._in_flight.popleft()
        self.stalled = False

    def rest(self) -> None:
        """Nothing is in flight, and nothing will be for a while."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        self._timer = None
        if not self._in_flight:
            return
        step, since = self._in_flight[0]
        waited = self._loop.time() - since
        if waited >= 2 * self._limit:
            self._on_failure(DeviceStalled(step, "copy", self._rank, waited))
            return
        self.stalled = waited >= self._limit
        next_limit = 2 * self._limit if self.stalled else self._limit
        self._timer = self._loop.call_later(next_limit - waited, self._look)
