"""How the benchmarks measure: sides in turn, medians with their spread, and who else was busy."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import median
from time import perf_counter, process_time
from typing import TypeVar

import msgspec

Side = TypeVar("Side", bound=Hashable)
T = TypeVar("T")

BUSY = 0.12
"""Cores used by others from which on a run on the CPU says little: a team of compute threads waits
for its slowest member, so a part of one foreign core slows the whole team."""


class Spread(msgspec.Struct, frozen=True):
    """Several runs of one measurement.

    Attributes:
        low, high: first and third quartile; of fewer than four runs, the least and the most.
    """

    median: float
    low: float
    high: float
    runs: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Raises ``ValueError`` if there are none."""
        ordered = sorted(values)
        if not ordered:
            raise ValueError("no runs")
        quarter = len(ordered) // 4
        return cls(median(ordered), ordered[quarter], ordered[-1 - quarter], len(ordered))


class Foreign:
    """Cores that other processes used while a run was measured; ``nan`` where nobody can tell."""

    cores: float = float("nan")

    @property
    def quiet(self) -> bool:
        """Whether the machine was ours, as far as can be told."""
        return not self.cores > BUSY


@contextmanager
def watching_others() -> Iterator[Foreign]:
    """Measure what other processes take of the machine within the block.

    Child processes that end within the block count as ours.
    """
    seen = Foreign()
    busy, own, began = _machine_busy(), _own_busy(), perf_counter()
    try:
        yield seen
    finally:
        seconds = perf_counter() - began
        if busy is not None and (now := _machine_busy()) is not None and seconds > 0:
            seen.cores = max(0.0, (now - busy - (_own_busy() - own)) / seconds)


async def alternate(
    sides: Mapping[Side, Callable[[], Awaitable[T]]], rounds: int
) -> dict[Side, list[T]]:
    """Run each side once a round, ``rounds`` times, one after another, and keep all results.

    The order turns from round to round, so that what drifts (heat, neighbours) meets all alike.
    """
    results: dict[Side, list[T]] = {side: [] for side in sides}
    order = list(sides)
    for _ in range(rounds):
        for side in order:
            results[side].append(await sides[side]())
        order.append(order.pop(0))
    return results


def _machine_busy() -> float | None:
    """Seconds that all processes have used since the machine started, over all cores."""
    try:
        with open("/proc/stat", encoding="ascii") as stat:
            fields = [int(field) for field in stat.readline().split()[1:9]]
    except (OSError, ValueError):
        return None
    user, nice, system, _idle, _iowait, irq, softirq, _steal = fields
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def _own_busy() -> float:
    children = os.times()
    return process_time() + children.children_user + children.children_system
