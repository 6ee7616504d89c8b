"""How late an event loop runs what is due: a callback every few milliseconds, and percentiles."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from time import perf_counter
from typing import Any

import numpy as np

INTERVAL = 0.005
"""Seconds from one due time to the next."""


class Lags(list[float]):
    """Seconds by which each tick came late."""


@asynccontextmanager
async def ticking(
    interval: float = INTERVAL, now: Callable[[], float] = perf_counter
) -> AsyncIterator[Lags]:
    """Sample the lag of the running loop within the block.

    Ticks are due at fixed times, whatever became of those before: a loop that stands still for
    100 ms is late for twenty of them, as it would be for twenty requests.
    """
    loop = asyncio.get_running_loop()
    lags = Lags()
    due = now() + interval
    handle: asyncio.TimerHandle

    def tick() -> None:
        nonlocal due, handle
        at = now()
        while due <= at:
            lags.append(at - due)
            due += interval
        # uvloop counts in whole milliseconds and may call a fraction early: then this tick waits.
        handle = loop.call_later(due - at, tick)

    handle = loop.call_later(interval, tick)
    try:
        yield lags
    finally:
        handle.cancel()


def percentile_ms(seconds: Sequence[float], percent: float) -> float:
    """A percentile in milliseconds, a value that was measured; ``nan`` if there are none."""
    if not seconds:
        return float("nan")
    return float(np.percentile(np.asarray(seconds), percent, method="higher")) * 1e3


class Collections:
    """What the garbage collector took: pauses in seconds, of every thread that holds the GIL."""

    def __init__(self) -> None:
        self.pauses: list[float] = []
        self._since = 0.0

    def __call__(self, phase: str, info: dict[str, Any]) -> None:
        if phase == "start":
            self._since = perf_counter()
        else:
            self.pauses.append(perf_counter() - self._since)


@contextmanager
def watching_collections() -> Iterator[Collections]:
    """Note the pauses of the garbage collector within the block."""
    seen = Collections()
    gc.callbacks.append(seen)
    try:
        yield seen
    finally:
        gc.callbacks.remove(seen)
