"""WaitingQueue: who is admitted next."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from aiosched.scheduler.requests import Request, State


class WaitingQueue:
    """Requests that wait for admission, by their ``key``, smallest first.

    Ageing needs no upkeep: one level of priority weighs as much as ``priority_aging`` seconds of
    waiting, and since everybody ages alike the order of two requests never changes. A request of
    priority p that arrived at t has the key ``t - p * priority_aging``; it is overtaken by later
    ones only within a bounded time, so nobody starves. A retracted request keeps its key and so
    stands before everybody of its priority that it was admitted before.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[float, int], Request]] = []
        self._waiting: set[Request] = set()

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._waiting)

    def push(self, request: Request) -> None:
        request.state = State.QUEUED
        self._waiting.add(request)
        heapq.heappush(self._heap, (request.key, request))

    def set_aside(self, request: Request) -> None:
        """It was popped, but waits for something other than its turn: until ``put_back``.

        It counts as waiting, and may ``remove`` itself, all the while.
        """
        self._waiting.add(request)

    def put_back(self, request: Request) -> None:
        """It waits for nothing but its turn again. Does nothing if it left meanwhile."""
        if request in self._waiting:
            heapq.heappush(self._heap, (request.key, request))

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it stands; its heap entry goes when it comes up."""
        self._waiting.discard(request)
        self._tidy()

    def pop(self) -> Request | None:
        """Take out the first, if there is one."""
        while self._heap:
            _, request = heapq.heappop(self._heap)
            if request in self._waiting:
                self._waiting.remove(request)
                self._tidy()
                return request
        return None

    def _tidy(self) -> None:
        """Forget those who left once they are the majority, so that they pay for the sweep."""
        if len(self._heap) > 2 * len(self._waiting):
            self._heap = [entry for entry in self._heap if entry[1] in self._waiting]
            heapq.heapify(self._heap)
