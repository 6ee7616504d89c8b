"""How much of the host's work the device's work hides."""

from __future__ import annotations

from collections import deque


class HiddenTime:
    """Lays intervals of host work over intervals of device work, both told in their order.

    What the device did during some host work is known only when its forward has come back, one or
    more steps later. Until then the host work is pending.

    Attributes:
        settled: seconds of host work for which it is known what the device did meanwhile.
        hidden: seconds of those in which the device was busy.
    """

    __slots__ = ("_pending", "hidden", "settled")

    def __init__(self) -> None:
        self.settled = 0.0
        self.hidden = 0.0
        self._pending: deque[tuple[float, float]] = deque()

    def host_worked(self, began: float, ended: float) -> None:
        self._pending.append((began, ended))

    def device_worked(self, started: float, finished: float) -> None:
        """Settle the host work up to ``finished``; it was idle between the last and ``started``."""
        pending = self._pending
        while pending:
            began, ended = pending[0]
            if began >= finished:
                return
            until = ended if ended < finished else finished
            self.settled += until - began
            if until > started:
                self.hidden += until - (began if began > started else started)
            if ended > finished:
                pending[0] = (finished, ended)
                return
            pending.popleft()

    def device_rests(self) -> None:
        """Nothing is in flight: all pending work was done on an idle device."""
        for began, ended in self._pending:
            self.settled += ended - began
        self._pending.clear()

    def forget(self) -> None:
        """Nobody knows what the device did: pending work counts for nothing."""
        self._pending.clear()
