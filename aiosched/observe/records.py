"""StepRecord: one step as it went, and what collects the records while the engine runs."""

from __future__ import annotations

from collections import deque

import msgspec

KEPT_STEPS = 10_000
"""Records that a timeline keeps: the latest. Some 5 MB."""

NOTHING_IN_FLIGHT = "nothing in flight"
"""Why a step did not overlap that was launched on an idle device."""


class StepRecord(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One step. Moments are seconds on the device's clock, 0.0 where they are unknown.

    The host works on a step twice: it plans and launches it, and it commits its result. Between
    launch and commit the event loop belongs to the rest of the program; of that the first turn is
    recorded, in which readers take the tokens of the step that was committed last.

    Attributes:
        step: its number, from 1.
        mode: ``decode``, ``extend`` or ``mixed``.
        sequences: that took part.
        tokens: that were sampled.
        depth: results that were pending when it was launched; 0: it did not overlap.
        reason: why it did not overlap, or overlapped less deeply than it could have.
        planning, planned: the host took in requests and planned it.
        launching, launched: the host handed it to the device.
        readers_began, readers_ended: the program's turn while the host waited for this step.
        device_started, device_finished: the forward, sampling included.
        landed, committed: the host took up the result, and had applied it.
        host_seconds: of the scheduler between the end of the step before it on the device and its
            own, whatever steps the host worked on.
        hidden_seconds: how much of those the device was busy.
        idle_gap_seconds: that the device stood idle before it; 0.0 after a rest, when there was
            nothing to do.
    """

    step: int
    mode: str
    sequences: int
    tokens: int
    depth: int
    reason: str | None
    planning: float
    planned: float
    launching: float
    launched: float
    readers_began: float
    readers_ended: float
    device_started: float
    device_finished: float
    landed: float
    committed: float
    host_seconds: float
    hidden_seconds: float
    idle_gap_seconds: float

    @property
    def device_seconds(self) -> float:
        """How long the device worked on it."""
        return self.device_finished - self.device_started

    @property
    def overlap_ratio(self) -> float:
        """Share of ``host_seconds`` that was hidden behind device work; 0.0 if there were none."""
        return self.hidden_seconds / self.host_seconds if self.host_seconds else 0.0


class _OpenStep:
    """What is known of a step that has not been committed."""

    __slots__ = (
        "depth",
        "launched",
        "launching",
        "mode",
        "planned",
        "planning",
        "readers_began",
        "readers_ended",
        "reason",
        "sequences",
    )

    def __init__(self, mode: str, sequences: int, planning: float, planned: float) -> None:
        self.mode = mode
        self.sequences = sequences
        self.planning = planning
        self.planned = planned
        self.depth = 0
        self.reason: str | None = None
        self.launching = self.launched = 0.0
        self.readers_began = self.readers_ended = 0.0


class StepRecorder:
    """Collects the moments of steps in flight, and keeps the records of the latest ``keep``."""

    def __init__(self, keep: int) -> None:
        self.records: deque[StepRecord] = deque(maxlen=keep)
        self._open: dict[int, _OpenStep] = {}

    def planned(self, step: int, mode: str, sequences: int, began: float, ended: float) -> None:
        self._open[step] = _OpenStep(mode, sequences, began, ended)

    def launching(self, step: int, depth: int, reason: str | None, now: float) -> None:
        if (open_step := self._open.get(step)) is not None:
            open_step.launching = now
            open_step.depth = depth
            open_step.reason = reason or (None if depth else NOTHING_IN_FLIGHT)

    def launched(self, step: int, now: float) -> None:
        if (open_step := self._open.get(step)) is not None:
            open_step.launched = now

    def readers_ran(self, step: int, began: float, ended: float) -> None:
        if (open_step := self._open.get(step)) is not None:
            open_step.readers_began, open_step.readers_ended = began, ended

    def committed(
        self,
        step: int,
        tokens: int,
        device: tuple[float, float],
        host: tuple[float, float],
        host_seconds: float,
        hidden_seconds: float,
        idle_gap_seconds: float,
    ) -> StepRecord | None:
        """Close the record of a step. ``None`` if recording began after it was planned."""
        open_step = self._open.pop(step, None)
        if open_step is None:
            return None
        record = StepRecord(
            step=step,
            mode=open_step.mode,
            sequences=open_step.sequences,
            tokens=tokens,
            depth=open_step.depth,
            reason=open_step.reason,
            planning=open_step.planning,
            planned=open_step.planned,
            launching=open_step.launching,
            launched=open_step.launched,
            readers_began=open_step.readers_began,
            readers_ended=open_step.readers_ended,
            device_started=device[0],
            device_finished=device[1],
            landed=host[0],
            committed=host[1],
            host_seconds=host_seconds,
            hidden_seconds=hidden_seconds,
            idle_gap_seconds=idle_gap_seconds,
        )
        self.records.append(record)
        return record
