"""C79, C80: idle costs nothing, and a device that is dead becomes an error with a name.

The single-rank part of invariant 9: every wait has a deadline.
"""

from __future__ import annotations

import asyncio
import gc
import selectors
import time

import pytest
from engines import DEPTHS, greedy, prompt, settle, small_engine, tokens_of

from aiosched import DeviceStalled, SamplingParams
from aiosched.device.cpu import CpuDevice
from aiosched.device.sim import SimDevice
from aiosched.testing.hash_model import HashModel, oracle

PROMPT = prompt(1, 9)
ANSWER = oracle(PROMPT, 40)


class CountingSelector(selectors.DefaultSelector):
    """Counts how often the loop went to sleep without having anything to do."""

    def __init__(self):
        super().__init__()
        self.sleeps = 0

    def select(self, timeout=None):
        self.sleeps += timeout is None or timeout > 0
        return super().select(timeout)


def own_timers(loop):
    return [timer for timer in loop._scheduled if not timer.cancelled()]


def test_three_idle_seconds_cost_no_wake_up_and_under_10_ms_of_cpu():
    """C79, in real time and on the device that people use: before traffic, and after it."""
    selector = CountingSelector()

    async def idle(seconds):
        loop = asyncio.get_running_loop()
        await asyncio.sleep(0.1)  # threads that have just been started come to rest
        assert not own_timers(loop)
        cpu, sleeps = time.process_time(), selector.sleeps
        await asyncio.sleep(seconds)
        assert selector.sleeps - sleeps == 1  # that of the test's own timer
        assert time.process_time() - cpu < 0.010

    async def main():
        device = CpuDevice(threads=1)
        async with small_engine(device=device) as engine:
            await idle(3.0)
            assert list((await engine.complete(PROMPT, greedy(40))).token_ids) == ANSWER
            await idle(0.5)
            assert list((await engine.complete(PROMPT, greedy(40))).token_ids) == ANSWER

    gc.collect()
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selector)) as runner:
        runner.run(main())


@pytest.mark.parametrize("depth", DEPTHS)
def test_hours_without_a_request_are_healthy_and_set_no_timer(vrun, depth):
    async def main():
        loop = asyncio.get_running_loop()
        async with small_engine(overlap_depth=depth, step_timeout=10) as engine:
            for _ in range(3):
                await settle(engine)
                assert not own_timers(loop)
                await asyncio.sleep(10_000)
                assert engine.health().ok
                assert list((await engine.complete(PROMPT, greedy(40))).token_ids) == ANSWER

    vrun(main())


@pytest.mark.invariant(9)
@pytest.mark.parametrize("depth", DEPTHS)
def test_a_device_that_never_answers_stalls_then_fails_with_step_fence_and_rank(vrun, depth):
    """C80."""

    async def main():
        loop = asyncio.get_running_loop()
        device = SimDevice(gated=True)
        engine = small_engine(
            device=device, overlap_depth=depth, step_timeout=10, max_running_requests=2
        )
        await engine.open()
        streams = [engine.generate(prompt(i, 9), greedy(8)) for i in range(4)]
        readers = [asyncio.ensure_future(tokens_of(stream)) for stream in streams]
        readers.append(asyncio.ensure_future(engine.complete(PROMPT, greedy(8))))
        await asyncio.sleep(9.9)
        assert engine.health().ok
        await asyncio.sleep(0.2)
        assert (engine.health().status, engine.health().ok) == ("stalled", False)
        await asyncio.sleep(10)
        assert engine.health().status == "failed"
        assert "step 1" in engine.health().reason

        errors = await asyncio.gather(*readers, return_exceptions=True)
        for error in errors:
            assert isinstance(error, DeviceStalled)
            assert (error.step, error.fence, error.rank) == (1, "copy", 0)
        assert len({id(error) for error in errors}) == len(errors)
        with pytest.raises(DeviceStalled):
            engine.generate(PROMPT)
        since = loop.time()
        await engine.close()
        assert loop.time() - since <= 10
        assert engine.health().status == "closed"

    vrun(main())


@pytest.mark.parametrize("depth", DEPTHS)
def test_slow_steps_within_the_limit_are_healthy(vrun, depth):
    async def main():
        device = SimDevice(forward_time=5.0)
        async with small_engine(
            device=device, overlap_depth=depth, step_timeout=5.0 * (depth + 1) + 5
        ) as engine:
            answer = asyncio.ensure_future(engine.complete(PROMPT, greedy(10)))
            while not answer.done():
                assert engine.health().ok
                await asyncio.sleep(0.5)
            assert list((await answer).token_ids) == ANSWER[:10]

    vrun(main())


@pytest.mark.parametrize("depth", [1, 2])
def test_a_step_that_waits_for_the_steps_before_it_is_not_counted_as_slow(vrun, depth):
    """Of ``depth + 1`` steps in flight the last is launched long before the device gets to it."""

    async def main():
        device = SimDevice(forward_time=5.0)
        async with small_engine(device=device, overlap_depth=depth, step_timeout=9) as engine:
            answer = asyncio.ensure_future(engine.complete(PROMPT, greedy(10)))
            while not answer.done():
                assert engine.health().ok
                await asyncio.sleep(0.5)
            assert list((await answer).token_ids) == ANSWER[:10]

    vrun(main())


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_step_that_answers_after_all_makes_the_engine_healthy_again(vrun, depth):
    async def main():
        device = SimDevice()
        device.hold(label="forward")
        async with small_engine(device=device, overlap_depth=depth, step_timeout=10) as engine:
            answer = asyncio.ensure_future(engine.complete(PROMPT, greedy(40)))
            await asyncio.sleep(15)
            assert engine.health().status == "stalled"
            device.release()
            assert list((await answer).token_ids) == ANSWER
            assert engine.health().ok

    vrun(main())


def test_a_sampled_request_after_hours_of_sleep_is_served_with_its_seed(vrun):
    async def main():
        async with small_engine(HashModel()) as engine:
            params = SamplingParams(max_tokens=10, seed=7)
            first = await engine.complete(PROMPT, params)
            await asyncio.sleep(36_000)
            assert (await engine.complete(PROMPT, params)).token_ids == first.token_ids

    vrun(main())
