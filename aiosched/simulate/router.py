"""Routers: which replica gets a request."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

from aiosched.simulate.trace import TraceRequest

GUARD = 8
"""Requests by which the home of a prefix may be busier than the least loaded replica."""


class Router(Protocol):
    """Picks a replica for each request, in the order of their arrival."""

    def route(self, request: TraceRequest, loads: Sequence[int]) -> int:
        """The index of a replica. ``loads``: unfinished requests of each."""


class RoundRobin:
    """Each in turn."""

    def __init__(self) -> None:
        self._next = 0

    def route(self, request: TraceRequest, loads: Sequence[int]) -> int:
        chosen = self._next % len(loads)
        self._next += 1
        return chosen


class LeastLoaded:
    """The one with the fewest unfinished requests; of several such, the one that waited longest."""

    def __init__(self) -> None:
        self._last_used: dict[int, int] = {}
        self._turn = 0

    def route(self, request: TraceRequest, loads: Sequence[int]) -> int:
        self._turn += 1
        last_used = self._last_used
        chosen = min(range(len(loads)), key=lambda i: (loads[i], last_used.get(i, 0)))
        last_used[chosen] = self._turn
        return chosen


class PrefixAware:
    """Requests of one prefix go to one replica, whose cache holds it, while that is not too busy.

    A home that has ``GUARD`` requests more than the least loaded replica passes the request on to
    that one, which is the prefix's home from then on. Requests without a prefix go to the least
    loaded.
    """

    def __init__(self) -> None:
        self._homes: dict[str, int] = {}
        self._least_loaded = LeastLoaded()

    def route(self, request: TraceRequest, loads: Sequence[int]) -> int:
        prefix = request.prefix_id
        home = None if prefix is None else self._homes.get(prefix)
        if home is not None and loads[home] < min(loads) + GUARD:
            return home
        chosen = self._least_loaded.route(request, loads)
        if prefix is not None:
            self._homes[prefix] = chosen
        return chosen


ROUTERS: Mapping[str, Callable[[], Router]] = MappingProxyType(
    {"round-robin": RoundRobin, "least-loaded": LeastLoaded, "prefix-aware": PrefixAware}
)
