"""What a commit asks of the device, with streams of a fake GPU."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import pytest
from fake_cuda import FakeCuda

from aiosched.device.cuda import CudaDevice
from aiosched.device.stream import InFlight
from aiosched.model.inputs import StepInputs, StepResult
from aiosched.observe.steps import StepMeter
from aiosched.scheduler.batch import ForwardMode, ScheduleBatch
from aiosched.scheduler.cohort import Cohort
from aiosched.scheduler.core import EngineCore
from aiosched.scheduler.depth import FixedDepth
from aiosched.scheduler.future_map import FutureMap
from aiosched.scheduler.inbox import Inbox
from aiosched.scheduler.rows import RowTable
from aiosched.scheduler.scheduler import Limits, Scheduler
from aiosched.scheduler.watchdog import Watchdog


@dataclass
class Step:
    forward: InFlight[Any]
    result: InFlight[StepResult]
    memory: object


class KernelRunner:
    """Steps of one kernel and one copy each."""

    def __init__(self, gpu: FakeCuda, device: CudaDevice, relay: FutureMap) -> None:
        self.gpu, self.device, self.relay = gpu, device, relay

    def launch(self, inputs: StepInputs) -> Step:
        forward = self.device.forward.launch(
            lambda: self.gpu.kernel(seconds=0.004), step=inputs.step, label="forward"
        )
        copy = self.device.copy.launch(
            lambda: StepResult(np.empty(0, np.int64)),
            step=inputs.step,
            label="copy",
            after=[forward],
        )
        self.relay.expect(inputs.step, copy)
        return Step(forward, copy, self)


def empty_batch(step: int) -> ScheduleBatch:
    inputs = replace(StepInputs.empty(page_size=4), step=step)
    nobody = Cohort.of((), RowTable(1, 1))
    return ScheduleBatch(inputs, ForwardMode.DECODE, (), nobody, releases=0)


@asynccontextmanager
async def opened() -> AsyncIterator[tuple[EngineCore, FakeCuda, CudaDevice]]:
    loop, gpu = asyncio.get_running_loop(), FakeCuda()
    device, relay = CudaDevice(api=gpu), FutureMap(4)
    gpu.eager = True  # opening waits for an event of its own
    device.open(loop)
    gpu.eager = False
    limits = Limits(16, 4, 32, 2, 8, 8, 1)
    yield (
        EngineCore(
            loop,
            Scheduler(limits, Inbox(loop), ()),
            KernelRunner(gpu, device, relay),
            relay,
            Watchdog(loop, 60.0, lambda stalled: None),
            device,
            vocab_size=8,
            depth=FixedDepth(1),
        ),
        gpu,
        device,
    )
    device.close(10)


def test_a_commit_has_read_the_times_of_its_forward_though_only_the_copy_was_awaited(run) -> None:
    async def main() -> None:
        async with opened() as (core, gpu, _):
            for step in (1, 2, 3):
                core.launch(empty_batch(step))
                gpu.run()
                await core.commit(empty_batch(step))
                assert core.meter.device == pytest.approx(0.004 * step, abs=1e-6)
            assert core.meter.idle_gap == pytest.approx(0.0, abs=1e-6)

    run(main())


def test_a_commit_tells_the_device_that_the_host_reads_the_step(run, monkeypatch) -> None:
    async def main() -> None:
        async with opened() as (core, gpu, device):
            told: list[object] = []
            monkeypatch.setattr(device, "host_access", lambda *, reads: told.extend(reads))
            core.launch(empty_batch(1))
            memory = core._in_flight[1].memory
            gpu.run()
            await core.commit(empty_batch(1))
            assert told == [memory]

    run(main())


def test_a_forward_without_times_counts_as_a_step_and_as_no_time() -> None:
    meter = StepMeter()
    loop = cast(asyncio.AbstractEventLoop, None)
    timed, unknown = InFlight[None](1, "forward", loop), InFlight[None](2, "forward", loop)
    timed.started, timed.finished = 100.0, 100.5
    meter.step_done(1, timed)
    meter.step_done(1, unknown)
    meter.step_done(1, timed)
    assert (meter.steps, meter.tokens) == (3, 3)
    assert meter.device == pytest.approx(1.0)
    assert meter.idle_gap == 0.0
