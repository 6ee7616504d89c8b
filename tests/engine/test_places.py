"""``max_running_requests`` bounds every step, also when many readers come back at once."""

from __future__ import annotations

import asyncio

import pytest
from engines import (
    DEPTHS,
    WatchedModel,
    assert_baseline,
    greedy,
    prompt,
    settle,
    small_engine,
    tokens_of,
)
from kv_audit import Watch

from aiosched.device.sim import SimDevice
from aiosched.testing.hash_model import oracle

MOST = 2


@pytest.mark.parametrize("kv_tokens", [1024, 112], ids=["roomy", "scarce"])
@pytest.mark.parametrize("depth", DEPTHS)
def test_readers_that_come_back_at_once_take_turns(vrun, depth, kv_tokens):
    """Six paused requests resume together, and two newcomers wait behind them; all get through."""
    model = WatchedModel()

    async def main():
        async with small_engine(
            model,
            overlap_depth=depth,
            max_running_requests=MOST,
            max_unread_tokens=6,
            kv_tokens=kv_tokens,
            page_size=4,
        ) as engine:
            watch = Watch(engine)
            streams = [engine.generate(prompt(i, 5), greedy(24)) for i in range(6)]
            await settle(engine)
            assert engine.stats().paused == 6
            readers = [asyncio.ensure_future(tokens_of(stream)) for stream in streams]
            late = [engine.generate(prompt(i, 5), greedy(24)) for i in (6, 7)]
            readers += [asyncio.ensure_future(tokens_of(stream)) for stream in late]
            for i, tokens in enumerate(await asyncio.gather(*readers)):
                assert tokens == oracle(prompt(i, 5), 24)
            assert max(step.num_sequences for step in model.steps) == MOST
            assert watch.steps
            await settle(engine)
            assert_baseline(engine)

    vrun(main())


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("end", ["abort", "deadline", "drain"])
def test_one_that_waits_for_a_place_may_end(vrun, depth, end):
    device = SimDevice(forward_time=0.01)

    async def main():
        async with small_engine(
            device=device, overlap_depth=depth, max_running_requests=1, max_unread_tokens=4
        ) as engine:
            deadline = 3.0 if end == "deadline" else None
            slow = engine.generate(prompt(1, 5), greedy(40), deadline=deadline)
            await anext(slow)
            await settle(engine)
            other = engine.generate(prompt(2, 5), greedy(900))
            reading = asyncio.ensure_future(tokens_of(other))
            await asyncio.sleep(0.1)
            for _ in range(3):
                await anext(slow)
            await asyncio.sleep(0.1)
            stats = engine.stats()
            assert (stats.running, stats.paused, stats.waiting) == (1, 1, 0)
            match end:
                case "abort":
                    slow.abort()
                case "deadline":
                    await asyncio.sleep(3.0)
                    assert slow.finish_reason == "deadline"
                case "drain":
                    await engine.drain(timeout=0.1)
            await asyncio.sleep(0.1)
            assert engine.stats().paused == 0
            other.abort()
            await reading
            await settle(engine)
            assert_baseline(engine)

    vrun(main())
