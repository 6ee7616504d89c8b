"""EngineCore: one method for each word of the loops."""

from __future__ import annotations

import asyncio
import contextlib

from aiosched.device.stream import Device
from aiosched.errors import AioschedError
from aiosched.observe.steps import StepMeter
from aiosched.scheduler.batch import Launched, Runner, ScheduleBatch
from aiosched.scheduler.depth import DepthPolicy
from aiosched.scheduler.future_map import FutureMap
from aiosched.scheduler.overlap import NoOverlap, may_overlap
from aiosched.scheduler.results import ResultProcessor
from aiosched.scheduler.scheduler import Scheduler
from aiosched.scheduler.watchdog import Watchdog


class SchedulerStuck(AioschedError):
    """Requests wait, nothing is in flight, and no step can be planned: a bug in aiosched."""


class EngineCore:
    """What the loops are made of: intake, plan, launch, commit, idle.

    Attributes:
        depth: results that may be pending behind the batch that was planned last.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        scheduler: Scheduler,
        runner: Runner,
        future_map: FutureMap,
        watchdog: Watchdog,
        device: Device,
        *,
        vocab_size: int,
        depth: DepthPolicy,
        disable_consecutive_prefill_overlap: bool = False,
        timeline: bool = False,
    ) -> None:
        self.depth = 0
        self.meter = StepMeter(device.now, timeline=timeline)
        self._loop = loop
        self._scheduler = scheduler
        self._runner = runner
        self._future_map = future_map
        self._watchdog = watchdog
        self._device = device
        self._results = ResultProcessor(scheduler.state, vocab_size, scheduler.eos_token_ids)
        self._policy = depth
        self._zero: NoOverlap | None = None
        self._no_consecutive_prefill = disable_consecutive_prefill_overlap
        self._in_flight: dict[int, Launched] = {}
        self._held_back = 0  # the last step that was not overlapped

    def intake(self) -> None:
        """Requests, aborts and deadlines since the last turn."""
        self.meter.plan_begins()
        self._scheduler.intake(self._loop.time())

    def plan(self) -> ScheduleBatch | None:
        """The next step, or ``None``."""
        batch = self._scheduler.plan()
        if batch is None:
            return None
        state = self._scheduler.state
        alone = not state.prefilling and not state.waiting
        self.depth, self._zero = self._policy.choose(batch, alone)
        if self._zero is NoOverlap.FIRST_TOKEN:
            self.meter.did_not_overlap(self._zero)
        if self.meter.recording:
            self.meter.planned(batch.step, batch.mode.value, len(batch.requests))
        return batch

    def may_overlap(self, batch: ScheduleBatch, last: ScheduleBatch) -> bool:
        """Whether ``batch`` may be launched before the result of ``last`` is in."""
        reason = may_overlap(
            batch,
            last,
            depth=self.depth,
            zero=self._zero or NoOverlap.DEPTH,
            disable_consecutive_prefill_overlap=self._no_consecutive_prefill,
        )
        if reason is not None and self._held_back != batch.step:  # asked again after each commit
            self._held_back = batch.step
            self.meter.did_not_overlap(reason)
        return reason is None

    def launch(self, batch: ScheduleBatch) -> None:
        """Enqueue the step; returns before the device has run it."""
        if self.meter.recording:
            self.meter.launching(batch.step, len(self._in_flight), self._zero)
        launched = self._runner.launch(batch.inputs)
        self._in_flight[batch.step] = launched
        self._watchdog.launched(batch.step)
        self._policy.launched(self._device.now())
        if self.meter.recording:
            self.meter.launched(batch.step)

    async def commit(self, batch: ScheduleBatch) -> None:
        """Wait for the step's result to land, and apply it.

        Gives the event loop a turn in any case: on a device that is always done already, readers
        would otherwise never run.
        """
        self.meter.host_ends()
        if self.meter.recording:  # behind the readers that were woken since the last turn
            self._loop.call_soon(self.meter.readers_ran, batch.step)
        launched = self._in_flight[batch.step]
        if launched.result.done():
            await asyncio.sleep(0)
        result = await self._future_map.arrival(batch.step)
        self.meter.host_begins()
        del self._in_flight[batch.step]
        self._watchdog.landed()
        self._device.host_access(reads=(launched.memory,))
        self._results.process_batch_result(batch, result)
        # On CUDA looking is what reads the times: the copy's event says nothing of the forward's.
        forward = launched.forward
        forward.done()
        self.meter.step_done(len(batch.sampled), forward)
        self._policy.committed(batch, forward.started, forward.finished, self._device.now())

    async def idle(self) -> None:
        """Sleep until something arrives. Costs nothing: no timer but that of the next deadline."""
        state = self._scheduler.state
        if state.waiting or state.active:
            raise SchedulerStuck(
                f"{len(state.waiting)} requests wait and {state.active} run, "
                f"but no step can be planned (pages free: {state.memory.pool.free})"
            )
        self.meter.host_ends()
        self.meter.device_rests()
        self._policy.rests()
        self._watchdog.rest()
        deadline = state.next_deadline
        timer = None
        if deadline is not None:
            timer = self._loop.call_at(deadline, self._scheduler.inbox.wake)
        try:
            await self._scheduler.inbox.sleep()
        finally:
            if timer is not None:
                timer.cancel()

    async def settle(self, timeout: float) -> bool:
        """Wait for the steps in flight, whatever became of them, at most ``timeout`` seconds.

        Returns whether all of them answered.
        """
        try:
            async with asyncio.timeout(timeout):
                for launched in list(self._in_flight.values()):
                    with contextlib.suppress(Exception):
                        await launched.result
        except TimeoutError:
            return False
        self._in_flight.clear()
        return True
