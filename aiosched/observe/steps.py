"""StepMeter: where the time of a step goes."""

from __future__ import annotations

from collections import Counter
from time import perf_counter
from typing import Any

from aiosched.device.stream import InFlight


class StepMeter:
    """Sums over all steps, in seconds.

    ``device`` is time that the device spent in forwards. ``host`` is time that the scheduler kept
    the event loop busy. ``idle_gap`` is time that the device spent idle between two forwards while
    requests were running; the smaller it is against ``device``, the better the overlap.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.tokens = 0
        self.device = 0.0
        self.host = 0.0
        self.idle_gap = 0.0
        self.not_overlapped: Counter[str] = Counter()
        self._host_since: float | None = None
        self._last_finished: float | None = None

    def host_begins(self) -> None:
        if self._host_since is None:
            self._host_since = perf_counter()

    def host_ends(self) -> None:
        if self._host_since is not None:
            self.host += perf_counter() - self._host_since
            self._host_since = None

    def did_not_overlap(self, reason: str) -> None:
        self.not_overlapped[reason] += 1

    def device_rests(self) -> None:
        """No step is in flight and none will be for a while: a gap that counts for nothing."""
        self._last_finished = None

    def step_done(self, tokens: int, forward: InFlight[Any]) -> None:
        """A step's result, with ``tokens`` sampled, was processed.

        A ``forward`` without times says nothing of the device, and the gap to it is unknown.
        """
        self.steps += 1
        self.tokens += tokens
        if not forward.finished:
            self._last_finished = None
            return
        self.device += forward.device_seconds
        if self._last_finished is not None:
            self.idle_gap += max(0.0, forward.started - self._last_finished)
        self._last_finished = forward.finished
