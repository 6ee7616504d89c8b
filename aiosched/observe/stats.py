"""What ``Engine.stats()`` and ``Engine.health()`` return."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

import msgspec


class StepTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Averages over some steps. All are milliseconds a step but for the ratio.

    Attributes:
        steps: that the averages are of; 0: none yet, and all else is 0.0.
        device_ms: the device worked on the forward.
        host_ms: the scheduler kept the event loop busy.
        idle_gap_ms: the device stood idle before the forward although requests were running.
        overlap_ratio: share of the host's time in which the device was busy, in [0, 1]: what
            overlap hides. The rest is what makes the device wait.
    """

    steps: int
    device_ms: float
    host_ms: float
    idle_gap_ms: float
    overlap_ratio: float

    @classmethod
    def of(
        cls, steps: int, device: float, host: float, hidden: float, idle_gap: float
    ) -> StepTimes:
        """From seconds summed over ``steps``."""
        per_step = 1e3 / steps if steps else 0.0
        return cls(
            steps=steps,
            device_ms=device * per_step,
            host_ms=host * per_step,
            idle_gap_ms=idle_gap * per_step,
            overlap_ratio=hidden / host if host else 0.0,
        )

    @property
    def step_ms(self) -> float:
        """From the start of one forward to the start of the next."""
        return self.device_ms + self.idle_gap_ms


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counts and sums of an engine, at one moment. Times are seconds summed over all steps.

    Attributes:
        running: requests that take part in batches, or whose last results are pending.
        paused: requests that wait for their slow readers.
        waiting: requests that wait for admission.
        retractions: times that a request lost its KV to others and was read in again.
        steps: steps whose result was processed.
        tokens: tokens sampled by those.
        kv_pages_total, kv_pages_free, kv_pages_cached: pages of the KV cache; cached ones hold
            prefixes that no running request uses, and give way when pages are needed.
        device_seconds: time that the device spent in forwards.
        host_seconds: time that the scheduler kept the event loop busy.
        idle_gap_seconds: time that the device was idle between two forwards of a busy stretch.
        overlap_ratio: share of ``host_seconds`` in which the device was busy, in [0, 1]: host work
            that overlap hides. Host work of which it is not known yet is left out.
        recent: averages over the latest steps, at most 128.
        not_overlapped: steps that waited for the result before them, by reason.
        finished: requests that ended, by reason.
    """

    running: int
    paused: int
    waiting: int
    retractions: int
    steps: int
    tokens: int
    kv_pages_total: int
    kv_pages_free: int
    kv_pages_cached: int
    device_seconds: float
    host_seconds: float
    idle_gap_seconds: float
    overlap_ratio: float
    recent: StepTimes
    not_overlapped: Mapping[str, int]
    finished: Mapping[str, int]


class Status(StrEnum):
    """How an engine is."""

    NEW = "new"  # not opened yet
    OK = "ok"
    STALLED = "stalled"  # a step takes longer than step_timeout
    DRAINING = "draining"  # takes no new requests
    FAILED = "failed"
    CLOSED = "closed"


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """Whether an engine can serve, and why not."""

    status: Status
    reason: str | None = None

    @property
    def ok(self) -> bool:
        return self.status is Status.OK
