"""Who is retracted when pages run out, how often, and who merely waits."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import pytest
from engines import (
    WatchedModel,
    before_plan,
    greedy,
    prompt,
    slow_device,
    small_engine,
    tokens_of,
    turns,
)
from kv_audit import Watch, state_of

from aiosched import Engine
from aiosched.scheduler.requests import Request
from aiosched.testing.hash_model import oracle

VirtualRun = Callable[[Coroutine[Any, Any, Any]], Any]


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_two_requests_that_each_need_the_whole_pool_both_end(
    vrun: VirtualRun, depth: int
) -> None:  # C52
    async def steps(together: bool) -> int:
        prompts = [prompt(i, 16) for i in range(2)]
        engine = small_engine(None, slow_device(), kv_tokens=64, page_size=1, overlap_depth=depth)
        async with engine:
            Watch(engine)
            if together:
                await asyncio.gather(*(engine.complete(ids, greedy(49)) for ids in prompts))
            else:
                for ids in prompts:
                    done = await engine.complete(ids, greedy(49))
                    assert list(done.token_ids) == oracle(ids, 49)
            return engine.stats().steps

    alone = vrun(steps(together=False))
    assert vrun(steps(together=True)) <= 3 * alone


def test_overlap_does_not_make_retractions_frequent(vrun: VirtualRun) -> None:  # C52
    async def retractions(depth: int) -> int:
        engine = small_engine(
            None,
            slow_device(),
            kv_tokens=160,
            page_size=4,
            overlap_depth=depth,
            max_running_requests=32,
        )
        async with engine:
            state = state_of(engine)
            # Nothing is kept for growth, whatever retractions teach: else they are too rare.
            careless = partial(setattr, state, "new_token_ratio", 0.0)
            before_plan(engine, dict.fromkeys(range(1, 2000), careless))
            prompts = [prompt(i, 1 + i % 11) for i in range(500)]
            streams = [engine.generate(ids, greedy(2 + i % 11)) for i, ids in enumerate(prompts)]
            got = await asyncio.gather(*(tokens_of(stream) for stream in streams))
            for i, tokens in enumerate(got[::50]):
                assert tokens == oracle(prompts[50 * i], 2 + 50 * i % 11)
            return engine.stats().retractions

    plain = vrun(retractions(0))
    assert plain >= 30
    assert vrun(retractions(2)) <= 2 * plain


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_whoever_sits_out_a_step_for_want_of_budget_is_not_retracted(
    vrun: VirtualRun, depth: int
) -> None:  # C54
    async def main() -> None:
        model, prompts = WatchedModel(), [prompt(i, 2) for i in range(8)]
        engine = small_engine(
            model,
            slow_device(),
            overlap_depth=depth,
            max_batch_tokens=4,
            max_unread_tokens=3,
            page_size=1,
        )
        async with engine:
            Watch(engine)
            streams = [engine.generate(ids, greedy(20)) for ids in prompts]
            # Those who wait for readers make place for others.
            await until(lambda: engine.stats().paused == 8)
            before = len(model.steps)
            got = await asyncio.gather(*(tokens_of(stream) for stream in streams))
            assert got == [oracle(ids, 20) for ids in prompts]
            assert engine.stats().retractions == 0
        turns_taken = model.batches[before + depth : before + depth + 10]
        assert all(len(rows) == 4 for rows in turns_taken)
        for first, second in itertools.pairwise(turns_taken):
            assert len({*first, *second}) == 8

    vrun(main())


def test_the_victim_is_the_latest_of_the_lowest_priority(vrun: VirtualRun) -> None:  # C57
    async def main() -> None:
        engine = small_engine(
            None, slow_device(), kv_tokens=40, page_size=1, overlap_depth=1, prefix_cache=False
        )
        async with engine:
            Watch(engine)
            state = state_of(engine)
            state.new_token_ratio = 0.0  # nothing is kept for growth: retraction must happen
            prompts, priorities = [prompt(i, 8) for i in range(3)], (0, 0, 5)
            readers = []
            for ids, priority in zip(prompts, priorities, strict=True):
                stream = engine.generate(ids, greedy(20), priority=priority)
                readers.append(asyncio.ensure_future(tokens_of(stream)))
                await asyncio.sleep(0)
            requests = sorted(state_after_intake(engine), key=lambda r: r.key[1])
            await until(lambda: state.retractions > 0)
            assert [r.retractions for r in requests] == [0, 1, 0]
            # It stands before a new one of its priority.
            newcomer = asyncio.ensure_future(tokens_of(engine.generate([1, 2], greedy(2))))
            await turns()
            assert list(state.waiting) != []
            first = state.waiting.pop()
            assert first is requests[1]
            state.waiting.push(first)
            assert await asyncio.gather(*readers) == [oracle(ids, 20) for ids in prompts]
            assert await newcomer == oracle([1, 2], 2)

    vrun(main())


def state_after_intake(engine: Engine) -> set[Request]:
    engine._runtime.intake()
    return set(state_of(engine).live)


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it never came")
