"""Watchdog: turns a device that never answers into an error that names the step."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from aiosched.errors import DeviceStalled


class Watchdog:
    """Watches the oldest step in flight. One timer, and none while nothing is in flight.

    After ``limit`` seconds the engine counts as stalled; after twice that ``on_failure`` gets the
    error. A step's time begins when the step before it has answered: until then it waits for that
    one, however deep the pipeline is. The timer is not moved with each step: when it fires it looks
    how long the oldest step has taken. A program that blocked the event loop may have kept the
    answer from being seen, so a step fails only at a second look.
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
        self._in_flight: deque[int] = deque()
        self._since = 0.0  # when the time of the oldest step began
        self._timer: asyncio.TimerHandle | None = None

    def launched(self, step: int) -> None:
        if not self._in_flight:
            self._since = self._loop.time()
        self._in_flight.append(step)
        if self._timer is None:
            self._timer = self._loop.call_later(self._limit, self._look)

    def landed(self) -> None:
        """The oldest step has answered."""
        self._in_flight.popleft()
        self._since = self._loop.time()
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
        waited = self._loop.time() - self._since + 1e-6  # a timer may be early by a rounding error
        if self.stalled and waited >= 2 * self._limit:
            self._on_failure(DeviceStalled(self._in_flight[0], "copy", self._rank, waited))
            return
        self.stalled = waited >= self._limit
        left = (2 * self._limit if self.stalled else self._limit) - waited
        # Never at once: the answer may be there, and wait for its turn on the event loop.
        self._timer = self._loop.call_later(max(left, self._limit / 10), self._look)
