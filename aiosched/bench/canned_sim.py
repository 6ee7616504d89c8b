"""The simulated device with results from a table instead of a model's arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from aiosched.bench.null_device import CannedResults, inputs_of
from aiosched.device.sim import SimDevice
from aiosched.device.sim_stream import SimStream
from aiosched.device.stream import InFlight
from aiosched.model.inputs import StepInputs

T = TypeVar("T")


class CannedSimDevice(SimDevice):
    """A forward takes ``forward_time`` seconds and computes nothing.

    Whatever a model would compute here, it would compute on the host's own cores, and be in the
    way of what is measured.

    Args:
        on_step: called with the inputs of each step when its forward is launched.
        realtime: see ``SimDevice``.

    Attributes:
        forwards: all that were launched, in order, if ``keep`` is set.
    """

    def __init__(
        self,
        results: CannedResults,
        *,
        forward_time: float = 0.0,
        realtime: bool = False,
        on_step: Callable[[StepInputs], None] | None = None,
        keep: bool = False,
    ) -> None:
        super().__init__(forward_time, realtime=realtime, check=False, keep_trace=False)
        self.forwards: list[InFlight[Any]] = []
        self._results = results
        self._on_step = on_step
        self._keep = keep

    def _launch(
        self,
        stream: SimStream,
        fn: Callable[[], T],
        step: int,
        label: str,
        after: Sequence[InFlight[Any]],
        reads: Sequence[object],
        writes: Sequence[object],
    ) -> InFlight[T]:
        work: Callable[[], Any] = _nothing
        if stream is self.copy:
            work = lambda: self._results.landed(step)  # noqa: E731
        flight: InFlight[T] = super()._launch(stream, work, step, label, after, reads, writes)
        if stream is self.forward and (inputs := inputs_of(reads)) is not None:
            self._results.launched(inputs)
            if self._keep:
                self.forwards.append(flight)
            if self._on_step is not None:
                self._on_step(inputs)
        return flight


def _nothing() -> None:
    """The work of a stream that computes nothing."""
