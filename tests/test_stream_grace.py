"""TokenStream: a read that is cancelled loses nothing, and arms ``reader_grace``."""

from __future__ import annotations

import asyncio

import pytest
from engines import DEPTHS, assert_baseline, greedy, prompt, settle, small_engine, tokens_of

from aiosched.device.sim import SimDevice
from aiosched.testing.hash_model import oracle

PROMPT = prompt(1, 9)
ANSWER = oracle(PROMPT, 20)


@pytest.fixture
def device():
    return SimDevice(forward_time=0.1)


async def gone(engine):
    """The one request of this engine was aborted and has left nothing behind."""
    await asyncio.sleep(0.5)  # a step in flight
    await settle(engine)
    assert engine.stats().finished == {"abort": 1}
    assert_baseline(engine)


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("patience", [0.03, 0.1])
def test_wait_for_loses_no_token(vrun, device, depth, patience):
    """Also where the timeout and the token come in the same instant."""

    async def main():
        async with small_engine(device=device, overlap_depth=depth) as engine:
            stream = engine.generate(PROMPT, greedy(20))
            tokens, timeouts = [], 0
            while len(tokens) < 20:
                try:
                    tokens.append((await asyncio.wait_for(anext(stream), patience)).id)
                except TimeoutError:
                    timeouts += 1
            assert tokens == ANSWER
            assert timeouts
            assert stream.finish_reason == "length"

    vrun(main())


async def cancelled_read(stream):
    """A read that was cancelled, in a task that is kept, with the stream in its traceback."""
    task = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0.05)
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled()
    return task


@pytest.mark.parametrize("grace", [0.0, 1.0, 5.0])
def test_after_a_cancelled_read_the_request_lives_for_the_grace_time(vrun, grace):
    async def main():
        loop = asyncio.get_running_loop()
        device = SimDevice(gated=True)
        async with small_engine(device=device, reader_grace=grace) as engine:
            stream = engine.generate(PROMPT, greedy(20))
            kept = await cancelled_read(stream)
            assert stream.finish_reason is None
            if grace:
                await asyncio.sleep(grace - 0.01)
                assert not stream._answer.aborted
            await asyncio.sleep(0.02)
            assert stream._answer.aborted
            assert kept.cancelled()
            device.release()
            await gone(engine)
            assert loop.time() < grace + 1

    vrun(main())


def test_a_reader_that_comes_back_in_time_ends_the_grace(vrun):
    async def main():
        device = SimDevice(gated=True)
        async with small_engine(device=device, reader_grace=1.0, step_timeout=100) as engine:
            stream = engine.generate(PROMPT, greedy(20))
            for _ in range(5):
                await cancelled_read(stream)
                await asyncio.sleep(0.9)
            reader = asyncio.ensure_future(tokens_of(stream))
            await asyncio.sleep(10)
            device.release()
            assert await reader == ANSWER

    vrun(main())


def test_a_stream_that_was_never_read_has_no_grace_to_run_out(vrun, device):
    async def main():
        async with small_engine(device=device, reader_grace=0.0) as engine:
            stream = engine.generate(PROMPT, greedy(20))
            await asyncio.sleep(100)
            assert await tokens_of(stream) == ANSWER

    vrun(main())


def timers():
    return [t for t in asyncio.get_running_loop()._scheduled if not t.cancelled()]


@pytest.mark.parametrize("end", ["leave", "aclose", "read on"])
def test_the_grace_timer_does_not_outlive_its_purpose(vrun, end):
    async def main():
        device = SimDevice()
        async with small_engine(device=device, reader_grace=1000.0) as engine:
            device.hold(label="forward")
            async with engine.generate(PROMPT, greedy(20)) as stream:
                await cancelled_read(stream)
                assert 1000.05 in [timer.when() for timer in timers()]
                device.release()
                if end == "read on":
                    await tokens_of(stream)
                elif end == "aclose":
                    await stream.aclose()
                    assert 1000.05 not in [timer.when() for timer in timers()]
            await settle(engine)
            assert not timers()

    vrun(main())
