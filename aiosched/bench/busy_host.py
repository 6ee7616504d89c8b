"""A host that is busy for as long as one likes at every step, beside a simulated device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter

from aiosched.bench.canned_sim import CannedSimDevice
from aiosched.bench.null_device import CannedResults


class HostWork:
    """Python work on the event loop, so many seconds for each step that is committed.

    Attributes:
        seconds: a step.
        hiccup: seconds on top, at every ``every``-th step.
        committed: when each step was committed, on ``perf_counter``, before the work of that step.
    """

    def __init__(self, seconds: float = 0.0, hiccup: float = 0.0, every: int = 50) -> None:
        self.seconds = seconds
        self.hiccup = hiccup
        self.every = every
        self.committed: list[float] = []

    def __call__(self) -> None:
        self.committed.append(perf_counter())
        hiccup = self.hiccup if len(self.committed) % self.every == 0 else 0.0
        until = self.committed[-1] + self.seconds + hiccup
        while perf_counter() < until:
            pass


class BusyHostDevice(CannedSimDevice):
    """Real time; a forward takes ``forward_time`` seconds, and each commit calls ``work``."""

    def __init__(
        self, results: CannedResults, work: Callable[[], None], forward_time: float
    ) -> None:
        super().__init__(results, forward_time=forward_time, realtime=True, keep=True)
        self._work = work

    def host_access(self, *, reads: Sequence[object] = (), writes: Sequence[object] = ()) -> None:
        """The host reads the memory of a step when it commits it: that is where it works."""
        if reads:
            self._work()
