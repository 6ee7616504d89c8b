"""C81, C82: a drain lets requests end, a close ends them, and neither leaves anything behind."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import sys
import threading
import weakref

import pytest
from engines import DEPTHS, assert_baseline, greedy, prompt, settle, small_engine, tokens_of

from aiosched import Engine, EngineClosed, InvalidConfig
from aiosched.device.cpu import CpuDevice
from aiosched.device.sim import SimDevice
from aiosched.testing.hash_model import HashModel, oracle

PROMPT = prompt(1, 9)
ANSWER = oracle(PROMPT, 40)


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_drain_lets_requests_end_and_cuts_them_off_in_time(vrun, depth):
    """C81."""

    async def main():
        loop = asyncio.get_running_loop()
        device = SimDevice(forward_time=0.1)
        async with small_engine(device=device, overlap_depth=depth) as engine:
            short = asyncio.ensure_future(engine.complete(PROMPT, greedy(10)))
            long = asyncio.ensure_future(engine.complete(prompt(2, 9), greedy(600)))
            await asyncio.sleep(0.05)
            since = loop.time()
            draining = asyncio.ensure_future(engine.drain(2.0))
            await asyncio.sleep(0)
            assert (engine.health().status, engine.health().ok) == ("draining", False)
            with pytest.raises(EngineClosed, match="drains"):
                engine.generate(PROMPT)
            await draining
            assert loop.time() - since == pytest.approx(2.0)
            assert list((await short).token_ids) == ANSWER[:10]
            cut = await long
            assert cut.finish_reason == "abort"
            assert list(cut.token_ids) == oracle(prompt(2, 9), len(cut.token_ids))
            assert 18 <= len(cut.token_ids) <= 21
            await asyncio.sleep(0.3)
            await settle(engine)
            assert_baseline(engine)
            with pytest.raises(EngineClosed):
                engine.generate(PROMPT)

    vrun(main())


def test_a_drain_returns_as_soon_as_the_last_request_has_ended(vrun):
    async def main():
        loop = asyncio.get_running_loop()
        async with small_engine(device=SimDevice(forward_time=0.1)) as engine:
            stream = engine.generate(PROMPT, greedy(10))
            await engine.drain()
            assert loop.time() == pytest.approx(1.0)
            assert await tokens_of(stream) == ANSWER[:10]
            await engine.drain(0)

    vrun(main())


def descriptors():
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("device_kind", [CpuDevice, SimDevice])
def test_close_ends_every_stream_and_leaves_nothing(run, caplog, depth, device_kind):
    """C82. What is left behind is seen by ``run`` (tasks, reports) and here (all the rest)."""
    caplog.set_level(logging.WARNING)

    async def main():
        before = set(threading.enumerate())
        files = descriptors() if sys.platform == "linux" else None
        engine = small_engine(device=device_kind(), overlap_depth=depth)
        await engine.open()
        streams = [engine.generate(prompt(i, 9), greedy(200)) for i in range(5)]
        for stream in streams:
            await anext(stream)
        readers = [asyncio.ensure_future(tokens_of(stream)) for stream in streams[:3]]
        await asyncio.sleep(0)
        await engine.close()
        await engine.close()
        for outcome in await asyncio.gather(*readers, return_exceptions=True):
            assert isinstance(outcome, EngineClosed) or len(outcome) == 199
        for stream in streams[3:]:
            with pytest.raises(EngineClosed):
                await tokens_of(stream)
        with pytest.raises(EngineClosed):
            engine.generate(PROMPT)
        with pytest.raises(EngineClosed):
            await engine.open()
        assert engine.health().status == "closed"
        assert set(threading.enumerate()) == before
        if files is not None:
            assert descriptors() == files
        return weakref.ref(engine), weakref.ref(engine._runtime)

    references = run(main())
    gc.collect()
    assert [reference() for reference in references] == [None, None]
    assert not caplog.records


def test_an_engine_that_was_never_opened_can_be_closed_and_says_what_it_is(run):
    async def main():
        engine = small_engine()
        assert engine.health().status == "new"
        with pytest.raises(EngineClosed, match="not open"):
            engine.generate(PROMPT)
        await engine.close()
        assert engine.health().status == "closed"

    run(main())


def test_requests_that_wait_when_the_engine_closes_get_the_error_too(vrun):
    async def main():
        device = SimDevice()
        engine = small_engine(device=device, max_running_requests=1)
        await engine.open()
        device.hold(label="forward")
        streams = [engine.generate(prompt(i, 9), greedy(4)) for i in range(4)]
        readers = [asyncio.ensure_future(tokens_of(stream)) for stream in streams]
        await device.reached(1)
        closing = asyncio.ensure_future(engine.close())
        await asyncio.sleep(0)
        device.release()
        await closing
        outcomes = await asyncio.gather(*readers, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [EngineClosed] * 4

    vrun(main())


def test_a_close_that_is_cancelled_can_be_repeated(vrun):
    async def main():
        device = SimDevice(gated=True)
        engine = small_engine(device=device)
        await engine.open()
        stream = engine.generate(PROMPT, greedy(4))
        await asyncio.sleep(0.1)
        closing = asyncio.ensure_future(engine.close())
        await asyncio.sleep(0.1)
        closing.cancel()
        await asyncio.wait({closing})
        await engine.close()
        assert device._time is None  # the device was closed
        with pytest.raises(EngineClosed):
            await anext(stream)

    vrun(main())


@pytest.mark.parametrize("device_kind", [CpuDevice, SimDevice])
def test_a_close_that_is_cancelled_at_once_still_joins_the_threads(run, device_kind):
    async def main():
        before = set(threading.enumerate())
        engine = small_engine(device=device_kind())
        await engine.open()
        stream = engine.generate(PROMPT, greedy(200))
        await anext(stream)
        closing = asyncio.ensure_future(engine.close())
        await asyncio.sleep(0)
        closing.cancel()
        await asyncio.wait({closing})
        assert closing.cancelled()
        assert set(threading.enumerate()) == before

    run(main())


def test_a_second_close_returns_when_the_first_has_closed(run):
    async def main():
        before = set(threading.enumerate())
        engine = small_engine(device=CpuDevice())
        await engine.open()
        await anext(engine.generate(PROMPT, greedy(200)))
        first = asyncio.ensure_future(engine.close())
        await asyncio.sleep(0)
        await engine.close()
        assert set(threading.enumerate()) == before
        await first

    run(main())


def test_an_engine_that_is_closed_while_it_opens_stays_closed(run):
    async def main():
        before = set(threading.enumerate())
        engine = Engine(HashModel(), device="cpu", kv_tokens=1024)
        opening = asyncio.ensure_future(engine.open())
        await asyncio.sleep(0)
        await engine.close()
        with pytest.raises(EngineClosed, match="while it was being opened"):
            await opening
        assert engine.health().status == "closed"
        assert set(threading.enumerate()) == before

    run(main())


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), InvalidConfig),
        (ZeroDivisionError("a fault of the model's own"), ZeroDivisionError),
    ],
)
def test_an_engine_that_gets_no_kv_pool_says_why_and_leaves_nothing(run, error, raised):
    class Poor(HashModel):
        def make_kv(self, num_pages, page_size):
            raise error

    async def main():
        before = set(threading.enumerate())
        engine = small_engine(Poor(), CpuDevice())
        with pytest.raises(raised, match=r"memory|own"):
            await engine.open()
        assert set(threading.enumerate()) == before
        await engine.close()

    run(main())


def test_an_engine_that_is_dropped_open_warns_and_lets_its_threads_end(recwarn):
    """The scheduler's task is dropped with it, which the event loop reports by itself."""

    async def main():
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
        await small_engine(device=CpuDevice()).open()
        for _ in range(3):  # until the scheduler sleeps; before, the event loop knows its task
            await asyncio.sleep(0)
        gc.collect()
        assert any("unclosed engine" in str(w.message) for w in recwarn)
        await asyncio.sleep(0)

    before = set(threading.enumerate())
    asyncio.run(main())
    for thread in set(threading.enumerate()) - before:
        thread.join(10.0)
    assert set(threading.enumerate()) <= before
    assert any("unclosed engine" in str(w.message) for w in recwarn)


def test_an_engine_dropped_after_its_event_loop_lets_its_threads_end(recwarn):
    async def main():
        return await small_engine(device=CpuDevice()).open()

    before = set(threading.enumerate())
    engine = asyncio.run(main())
    del engine
    gc.collect()
    for thread in set(threading.enumerate()) - before:
        thread.join(10.0)
    assert set(threading.enumerate()) <= before
    assert any("unclosed engine" in str(w.message) for w in recwarn)
