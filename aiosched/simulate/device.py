"""A model without weights and a device that takes the time which a cost model says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from aiosched.device.sim import SimDevice
from aiosched.device.sim_stream import SimStream
from aiosched.device.stream import InFlight
from aiosched.model.inputs import DeviceInputs, StepInputs, StepResult
from aiosched.simulate.cost import StepCost, StepShape

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

VOCAB_SIZE = 1024
"""Enough for prompts to differ; nobody reads the answers."""


class SimulatedModel:
    """The outside of a model. A ``CostedDevice`` never calls ``forward``."""

    vocab_size = VOCAB_SIZE
    eos_token_ids: tuple[int, ...] = ()
    tokenizer = None

    def __init__(self, max_model_len: int) -> None:
        self.max_model_len = max_model_len

    def kv_bytes_per_token(self) -> int:
        return 1

    def make_kv(self, num_pages: int, page_size: int) -> object:
        return ()

    def forward(self, inputs: DeviceInputs, kv: object) -> torch.Tensor:
        raise NotImplementedError("a simulated model computes nothing")


class CostedDevice:
    """A ``SimDevice`` whose steps cost what their shapes do, and compute nothing.

    The forward stream takes the device's time. The host's time for a step passes on the copy
    stream, so its result lands when a real engine would have handled it: the scheduler waits no
    less and no longer, and with overlap the next step runs meanwhile. (The code of the scheduler
    itself takes no virtual time. It could not block a clock that other replicas share.)

    Args:
        on_launch: called with the shape of each step and its device time, when it is launched.
    """

    kind = "sim"
    torch_device = "cpu"

    def __init__(
        self,
        device: StepCost,
        host: StepCost,
        on_launch: Callable[[StepShape, float], None] = lambda shape, seconds: None,
    ) -> None:
        self._device_cost = device
        self._host_cost = host
        self._on_launch = on_launch
        self._costs: dict[int, tuple[float, float]] = {}  # step → device and host seconds
        self._sampled: dict[int, int] = {}  # step → rows that sample
        self._sim = SimDevice(
            forward_time=lambda step, label: self._costs[step][0],
            copy_time=lambda step, label: self._costs.pop(step)[1],
            check=False,
            keep_trace=False,
        )
        self.schedule = _StageStream(self)
        self.forward = _ForwardStream(self, self._sim.forward)
        self.copy = _CopyStream(self, self._sim.copy)
        self.loop: asyncio.AbstractEventLoop | None = None

    def open(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._sim.open(loop)

    def close(self, timeout: float) -> None:
        self._sim.close(timeout)

    def now(self) -> float:
        return self._sim.now()

    def host_access(self, *, reads: Sequence[object] = (), writes: Sequence[object] = ()) -> None:
        pass

    def launched(self, inputs: StepInputs) -> None:
        """The forward of a step is about to be launched."""
        shape = StepShape.of(inputs)
        seconds = self._device_cost.seconds(shape)
        self._costs[inputs.step] = seconds, self._host_cost.seconds(shape)
        self._sampled[inputs.step] = len(inputs.sample_sequence)
        self._on_launch(shape, seconds)

    def result(self, step: int) -> StepResult:
        """Tokens that mean nothing, one for each row that sampled."""
        return StepResult(tokens=np.zeros(self._sampled.pop(step), dtype=np.int64))


class _StageStream:
    """Staging is part of a step's device time: here it is done at once."""

    name = "schedule"

    def __init__(self, device: CostedDevice) -> None:
        self._device = device

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
        assert self._device.loop is not None
        flight: InFlight[T] = InFlight(step, label, self._device.loop)
        flight._finish(None)
        return flight


class _ForwardStream:
    def __init__(self, device: CostedDevice, stream: SimStream) -> None:
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
        for item in reads:
            if isinstance(item, StepInputs):
                self._device.launched(item)
        return self._stream.launch(_nothing, step=step, label=label)


class _CopyStream:
    def __init__(self, device: CostedDevice, stream: SimStream) -> None:
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
        def land() -> Any:
            return self._device.result(step)

        return self._stream.launch(land, step=step, label=label, after=after)


def _nothing() -> Any:
    return None
