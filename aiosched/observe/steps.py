"""StepMeter: where the time of a step goes."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

from aiosched.device.stream import InFlight
from aiosched.observe.hidden import HiddenTime
from aiosched.observe.records import KEPT_STEPS, StepRecord, StepRecorder
from aiosched.observe.stats import StepTimes
from aiosched.observe.step_log import StepLog

RECENT_STEPS = 128
"""Steps that ``EngineStats.recent`` averages."""


class StepMeter:
    """Sums over all steps, in seconds, and the records of single ones.

    ``device`` is time that the device spent in forwards. ``host`` is time that the scheduler kept
    the event loop busy. ``idle_gap`` is time that the device spent idle between two forwards while
    requests were running; the smaller it is against ``device``, the better the overlap.

    The core says what it does as it does it. ``recording`` is whether it should say all of it:
    a timeline is kept, or steps are logged. Otherwise it skips the calls that only records need.

    Args:
        clock: the one of the device (``Device.now``), so that host and device can be compared.
        timeline: keep the records of the latest steps.
    """

    def __init__(
        self, clock: Callable[[], float] = perf_counter, *, timeline: bool = False
    ) -> None:
        self.steps = 0
        self.tokens = 0
        self.device = 0.0
        self.host = 0.0
        self.idle_gap = 0.0
        self.not_overlapped: Counter[str] = Counter()
        self.recording = timeline
        self._timeline = timeline
        self._clock = clock
        self._overlap = HiddenTime()
        self._recorder = StepRecorder(KEPT_STEPS if timeline else 0)
        self._log = StepLog()
        self._recent: deque[tuple[float, float, float, float]] = deque(maxlen=RECENT_STEPS + 1)
        self._recent.append((0.0, 0.0, 0.0, 0.0))
        self._host_since: float | None = None
        self._host_until = 0.0
        self._plan_since = 0.0
        self._reason: str | None = None
        self._last_finished: float | None = None

    # What the core does ---------------------------------------------------------------------------

    def plan_begins(self) -> None:
        """The host takes in requests and plans a step."""
        self.host_begins()
        self._reason = None
        self.recording = self._timeline or self._log.wants_steps
        if self.recording:
            self._plan_since = self._clock()

    def host_begins(self) -> None:
        if self._host_since is None:
            self._host_since = self._clock()

    def host_ends(self) -> None:
        if self._host_since is not None:
            self._host_until = now = self._clock()
            self.host += now - self._host_since
            self._overlap.host_worked(self._host_since, now)
            self._host_since = None

    def did_not_overlap(self, reason: str) -> None:
        """The step to be launched next waits for a result, or was launched without one pending."""
        self.not_overlapped[reason] += 1
        self._reason = reason

    def device_rests(self) -> None:
        """No step is in flight and none will be for a while: a gap that counts for nothing."""
        self._last_finished = None
        self._overlap.device_rests()

    def step_done(self, tokens: int, forward: InFlight[Any]) -> None:
        """A step's result, with ``tokens`` sampled, was processed.

        A ``forward`` without times says nothing of the device, and the gap to it is unknown.
        """
        self.steps += 1
        self.tokens += tokens
        settled, hidden, gap = self._overlap.settled, self._overlap.hidden, 0.0
        if forward.finished:
            self.device += forward.device_seconds
            if self._last_finished is not None:
                gap = max(0.0, forward.started - self._last_finished)
                self.idle_gap += gap
            self._last_finished = forward.finished
            self._overlap.device_worked(forward.started, forward.finished)
        else:
            self._last_finished = None
            self._overlap.forget()
        overlap = self._overlap
        self._recent.append((self.device, overlap.settled, overlap.hidden, self.idle_gap))
        if self.recording:
            record = self._recorder.committed(
                forward.step,
                tokens,
                (forward.started, forward.finished),
                (self._host_since or 0.0, self._clock()),
                overlap.settled - settled,
                overlap.hidden - hidden,
                gap,
            )
            if record is not None:
                self._log.step(record)
        if (worked := self.device + self.idle_gap) >= self._log.due:
            self._log.summary(self.steps, self.tokens, worked, self.recent(), self.not_overlapped)

    # What others ask ------------------------------------------------------------------------------

    @property
    def overlap_ratio(self) -> float:
        """Share of the host's time that was hidden behind device work; 0.0 if there was none."""
        overlap = self._overlap
        return overlap.hidden / overlap.settled if overlap.settled else 0.0

    def recent(self) -> StepTimes:
        """Averages over the latest steps, at most ``RECENT_STEPS``."""
        first, last = self._recent[0], self._recent[-1]
        return StepTimes.of(
            len(self._recent) - 1, *(now - then for now, then in zip(last, first, strict=True))
        )

    @property
    def records(self) -> Sequence[StepRecord]:
        """The latest steps, oldest first; none unless a timeline is kept."""
        return self._recorder.records

    # Only while ``recording`` ---------------------------------------------------------------------

    def planned(self, step: int, mode: str, sequences: int) -> None:
        self._recorder.planned(step, mode, sequences, self._plan_since, self._clock())

    def launching(self, step: int, in_flight: int, reason: str | None) -> None:
        """With ``in_flight`` results pending. ``reason`` is why not, unless it was told before."""
        self._recorder.launching(step, in_flight, self._reason or reason, self._clock())

    def launched(self, step: int) -> None:
        self._recorder.launched(step, self._clock())

    def readers_ran(self, step: int) -> None:
        """One turn of the event loop has passed since ``host_ends``."""
        self._recorder.readers_ran(step, self._host_until, self._clock())
