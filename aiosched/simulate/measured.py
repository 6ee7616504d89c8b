"""A device that notes how long steps take, around one that runs them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from aiosched.device.stream import Device, InFlight, Stream
from aiosched.model.inputs import StepInputs
from aiosched.simulate.cost import StepShape

T = TypeVar("T")


class MeasuredStep(NamedTuple):
    """One step, in seconds.

    Attributes:
        device: from when the device could begin it to when its result had landed.
        host: from there to when the next step was launched; ``None`` if the scheduler launched
            none, or had not come round from an earlier step when the result landed.
    """

    shape: StepShape
    device: float
    host: float | None


class MeasuredDevice:
    """Passes everything on to ``device``, and keeps a record of each step.

    The record needs nothing of the scheduler: a step's first launch says when it was handed over,
    its last one brings the result, and ``host_access`` with reads says that the oldest result is
    being applied.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self.kind = device.kind
        self.torch_device = device.torch_device
        self.schedule = _MeasuredStream(self, device.schedule)
        self.forward = _MeasuredStream(self, device.forward)
        self.copy = _MeasuredStream(self, device.copy)
        self._records: dict[int, _Record] = {}
        self._pending: deque[_Record] = deque()  # launched, not applied yet
        self._applied: _Record | None = None  # the last, until the next launch
        self._turn_ended = 0.0

    def open(self, loop: asyncio.AbstractEventLoop) -> None:
        self._device.open(loop)

    def close(self, timeout: float) -> None:
        self._device.close(timeout)

    def now(self) -> float:
        return self._device.now()

    def host_access(self, *, reads: Sequence[object] = (), writes: Sequence[object] = ()) -> None:
        self._device.host_access(reads=reads, writes=writes)
        if reads and self._pending:
            self._applied = self._pending.popleft()
            self._applied.turn_before = self._turn_ended

    def take(self) -> list[MeasuredStep]:
        """The steps whose results were applied since the last call, in order."""
        steps: list[MeasuredStep] = []
        landed_before = 0.0
        pending = {record.step for record in self._pending}
        for record in self._records.values():
            if record.step not in pending:
                if (step := record.measured(landed_before)) is not None:
                    steps.append(step)
                landed_before = record.landed or landed_before
        self._records = {record.step: record for record in self._pending}
        return steps

    def launching(self, step: int, reads: Sequence[object]) -> _Record:
        """Work of a step is about to be launched."""
        record = self._records.get(step)
        if record is None:
            record = self._records[step] = _Record(step, self.now())
            self._pending.append(record)
            if self._applied is not None:
                self._applied.next = record
                self._applied = None
        for item in reads:
            if isinstance(item, StepInputs):
                record.shape = StepShape.of(item)
        return record

    def launched(self, record: _Record, flight: InFlight[Any]) -> None:
        """It was."""
        record.last = flight
        record.handed_over = self._turn_ended = self.now()


class _Record:
    """What is known of one step; times on the device's clock.

    Attributes:
        launched, handed_over: before its first launch, and after its last.
        turn_before: when the scheduler had last launched something, before it applied the result.
        next: the step that was launched right after that.
    """

    __slots__ = ("handed_over", "last", "launched", "next", "shape", "step", "turn_before")

    def __init__(self, step: int, launched: float) -> None:
        self.step = step
        self.launched = self.handed_over = launched
        self.shape: StepShape | None = None
        self.last: InFlight[Any] | None = None
        self.turn_before = 0.0
        self.next: _Record | None = None

    @property
    def landed(self) -> float | None:
        """When its result landed; ``None`` if that never was."""
        if self.last is None or not self.last.done() or not self.last.finished:
            return None
        return self.last.finished

    def measured(self, landed_before: float) -> MeasuredStep | None:
        """Its times, if the step before it landed at ``landed_before``."""
        landed = self.landed
        if self.shape is None or landed is None:
            return None
        host = None
        if self.next is not None and landed > self.turn_before:
            host = self.next.handed_over - landed
        return MeasuredStep(self.shape, landed - max(landed_before, self.launched), host)


class _MeasuredStream:
    def __init__(self, device: MeasuredDevice, stream: Stream) -> None:
        self.name = stream.name
        self._device = device
        self._stream = stream

    def launch(
        self,
        fn: Callable[[], T],
        *,
        step: int,
        label: str,
        after: Sequence[InFlight[Any]] = (),
        reads: Sequence[object] = (),
        writes: Sequence[object] = (),
    ) -> InFlight[T]:
        record = self._device.launching(step, reads)
        flight = self._stream.launch(
            fn, step=step, label=label, after=after, reads=reads, writes=writes
        )
        self._device.launched(record, flight)
        return flight
