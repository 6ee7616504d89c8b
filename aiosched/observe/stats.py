"""What ``Engine.stats()`` and ``Engine.health()`` return."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

import msgspec


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
