"""How many results may be pending behind a step: fixed, or chosen for each batch.

``overlap_depth="auto"`` chooses by what was seen:

- *First token.* If a step reads prompts to their end and nothing else can run, its result is all
  that anybody waits for: nothing is planned before it is in.
- *Jitter.* At depth k the host may react k steps late before the device runs dry. Usually it
  reacts within a fraction of a step, and depth 1 is enough; where it is late again and again
  (something else in the program holds up the event loop), depth 2 hides twice as much. More depth
  is not free: a request that a stop rule ends has run that many rows too many.
- *One processor.* Where the device is the host's own CPU, overlap takes from the forward what it
  hides. Nobody can tell beforehand which is more: both are tried, now and then, and the faster one
  is kept.
"""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import Protocol

from aiosched.scheduler.batch import ScheduleBatch
from aiosched.scheduler.overlap import NoOverlap

LATE_WINDOW = 128
"""Steps for which a late reaction of the host is remembered."""
LATE_ENOUGH = 2
"""Late reactions among those from which on lateness counts as a habit."""
TRIAL_STEPS = 12
"""Decode steps in a trial of one depth; the first two, which still feel the other, do not count."""
HOLD_STEPS = 400
"""Decode steps between two trials: if one depth is 5 % slower, trying it costs 0.15 %."""


class DepthPolicy(Protocol):
    """Called by ``EngineCore`` as steps are planned, launched and committed."""

    def choose(self, batch: ScheduleBatch, alone: bool) -> tuple[int, NoOverlap | None]:
        """Results that may stay pending once ``batch`` is launched; why, if that is none.

        Args:
            alone: nobody waits or is in the middle of a prompt: without the result of ``batch``
                nothing but its own requests can run next.
        """

    def launched(self, now: float) -> None:
        """A step was enqueued. Times are in seconds on the device's clock."""

    def committed(self, batch: ScheduleBatch, started: float, finished: float, now: float) -> None:
        """A step's result was applied. Its device times are 0.0 if they are not known."""

    def rests(self) -> None:
        """No step is in flight and none will be for a while."""


class FixedDepth:
    """The same depth for every batch."""

    def __init__(self, depth: int) -> None:
        self._choice = (depth, NoOverlap.DEPTH if depth == 0 else None)

    def choose(self, batch: ScheduleBatch, alone: bool) -> tuple[int, NoOverlap | None]:
        return self._choice

    def launched(self, now: float) -> None:
        pass

    def committed(self, batch: ScheduleBatch, started: float, finished: float, now: float) -> None:
        pass

    def rests(self) -> None:
        pass


def _first_token_is_due(batch: ScheduleBatch, alone: bool) -> bool:
    return alone and not batch.inputs.num_decodes and len(batch.sampled) == len(batch.requests)


class AutoDepth:
    """For a device of its own: depth 1, and 2 while the host is late again and again."""

    most = 2

    def __init__(self) -> None:
        self._step = 0
        self._late: deque[int] = deque(maxlen=LATE_ENOUGH)
        self._landed = 0.0
        self._device_seconds = 0.0

    def choose(self, batch: ScheduleBatch, alone: bool) -> tuple[int, NoOverlap | None]:
        if _first_token_is_due(batch, alone):
            return 0, NoOverlap.FIRST_TOKEN
        late = self._late
        if len(late) == LATE_ENOUGH and late[0] > self._step - LATE_WINDOW:
            return 2, None
        return 1, None

    def launched(self, now: float) -> None:
        """A reaction is late if it took longer than the device took for the step before."""
        if self._landed and now - self._landed > self._device_seconds:
            self._late.append(self._step)
        self._landed = 0.0

    def committed(self, batch: ScheduleBatch, started: float, finished: float, now: float) -> None:
        self._step += 1
        self._landed = finished
        self._device_seconds = finished - started

    def rests(self) -> None:
        self._landed = 0.0


class MeasuredDepth:
    """For a device that is the host's CPU: depth 0 or 1, whichever measures faster.

    Compared are the times from commit to commit of decode steps of one batch size. A trial runs one
    depth and then the other; a change of the batch breaks it off, and it begins again.
    """

    most = 1

    def __init__(self) -> None:
        self._depth = 1
        self._trying: int | None = 1  # the depth on trial, if any
        self._seen: list[float] = []  # step times of the trial so far
        self._first: float | None = None  # median of the depth that was tried first
        self._held = 0  # steps since the last trial
        self._rows = 0  # batch size of the last step, and of the last verdict
        self._rows_judged = 0
        self._last: float | None = None

    def choose(self, batch: ScheduleBatch, alone: bool) -> tuple[int, NoOverlap | None]:
        if _first_token_is_due(batch, alone):
            return 0, NoOverlap.FIRST_TOKEN
        depth = self._depth if self._trying is None else self._trying
        return depth, NoOverlap.SLOWER if depth == 0 else None

    def launched(self, now: float) -> None:
        pass

    def committed(self, batch: ScheduleBatch, started: float, finished: float, now: float) -> None:
        rows, before = len(batch.requests), self._last
        self._last = now
        if batch.mode.is_extend or rows != self._rows:
            self._rows = 0 if batch.mode.is_extend else rows
            self._restart()
        elif before is None:
            pass
        elif self._trying is not None:
            self._seen.append(now - before)
            if len(self._seen) >= TRIAL_STEPS:
                self._judge()
        else:
            self._held += 1
            judged = self._rows_judged
            if self._held >= HOLD_STEPS or not judged <= 2 * rows <= 4 * judged:
                self._trying, self._held = self._depth, 0

    def rests(self) -> None:
        self._last = None

    def _restart(self) -> None:
        """Another batch: what the trial has seen says nothing of it."""
        self._seen.clear()
        self._first = None
        if self._trying is not None:
            self._trying = self._depth

    def _judge(self) -> None:
        seconds = median(self._seen[2:])
        self._seen.clear()
        if self._first is None:
            self._first, self._trying = seconds, 1 - self._depth
            return
        if seconds < self._first:
            self._depth = 1 - self._depth
        self._first, self._trying, self._rows_judged = None, None, self._rows


def depth_policy(overlap_depth: int | str, device_kind: str) -> DepthPolicy:
    """The policy of the setting ``overlap_depth`` on a device (``Device.kind``)."""
    if isinstance(overlap_depth, int):
        return FixedDepth(overlap_depth)
    return MeasuredDepth() if device_kind == "cpu" else AutoDepth()


def deepest(overlap_depth: int | str) -> int:
    """The most results that may ever be pending: what rows are provided for."""
    return overlap_depth if isinstance(overlap_depth, int) else AutoDepth.most
