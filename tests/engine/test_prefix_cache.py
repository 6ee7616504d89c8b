"""The prefix cache under a running engine: what is shared, when, and what gives way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from engines import (
    DEPTHS,
    PAGE_SIZES,
    WatchedModel,
    assert_baseline,
    before_plan,
    greedy,
    launches,
    prompt,
    settle,
    slow_device,
    small_engine,
    tokens_of,
    turns,
)
from kv_audit import Watch, state_of

from aiosched import Engine, TokenStream
from aiosched.device.sim import SimDevice
from aiosched.testing.hash_model import oracle

VirtualRun = Callable[[Coroutine[Any, Any, Any]], Any]


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_equal_prompts_of_one_batch_come_to_share_their_pages(
    vrun: VirtualRun, page_size: int, depth: int
) -> None:  # C45
    async def main() -> None:
        ids, model, pages = prompt(1, 32), WatchedModel(), 32 // page_size
        engine = small_engine(model, slow_device(), page_size=page_size, overlap_depth=depth)
        async with engine:
            Watch(engine)
            both = await asyncio.gather(*(engine.complete(ids, greedy(12)) for _ in range(2)))
            assert [list(done.token_ids) for done in both] == [oracle(ids, 12)] * 2
            first, second = model.steps[0].page_tables[:, :pages]
            assert not set(first) & set(second)  # each computes its own copy
            for step in model.steps[1 + depth :]:
                assert (step.page_tables[:, :pages] == first).all()
            await settle(engine)
            assert_baseline(engine)

    vrun(main())


@pytest.mark.parametrize(("page_size", "length", "cached"), [(16, 32, 16), (16, 33, 32), (1, 9, 8)])
def test_a_repeated_prompt_is_cached_but_for_one_token_at_least(
    vrun: VirtualRun, page_size: int, length: int, cached: int
) -> None:  # C46
    async def main() -> None:
        ids = prompt(1, length)
        async with small_engine(None, slow_device(), page_size=page_size) as engine:
            first = await engine.complete(ids, greedy())
            again = await engine.complete(ids, greedy())
            assert first.token_ids == again.token_ids == tuple(oracle(ids, 8))
            assert first.usage.cached_tokens == 0
            assert again.usage.cached_tokens == cached < again.usage.prompt_tokens == length

    vrun(main())


def cached_pages(engine: Engine, ids: list[int]) -> int:
    radix = state_of(engine).memory.radix
    assert radix is not None
    return len(radix.match(ids, len(ids)).pages)


def test_the_least_recently_used_prefix_gives_way_leaves_first(vrun: VirtualRun) -> None:  # C47
    async def main() -> None:
        old, young, new = prompt(1, 48), prompt(2, 48), prompt(3, 112)
        async with small_engine(None, slow_device(), kv_tokens=128) as engine:
            for ids in (old, young):
                await engine.complete(ids, greedy(1))
            assert engine.stats().kv_pages_cached == 6
            assert list((await engine.complete(new, greedy(1))).token_ids) == oracle(new, 1)
            assert (cached_pages(engine, old), cached_pages(engine, young)) == (0, 1)

    vrun(main())


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_prefix_in_use_is_not_evicted(vrun: VirtualRun, depth: int) -> None:  # C47
    async def main() -> None:
        used, new = prompt(1, 64), prompt(2, 96)
        async with small_engine(None, slow_device(), kv_tokens=128, overlap_depth=depth) as engine:
            watch = Watch(engine)
            await engine.complete(used, greedy(1))
            holder = asyncio.ensure_future(engine.complete([*used, 5], greedy(30)))
            await turns()
            newcomer = asyncio.ensure_future(engine.complete(new, greedy(2)))
            assert list((await holder).token_ids) == oracle([*used, 5], 30)
            assert holder.result().usage.cached_tokens == 64
            assert list((await newcomer).token_ids) == oracle(new, 2)
            assert engine.stats().retractions == 0 and watch.steps

    vrun(main())


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_an_abort_leaves_the_shared_prefix_to_the_others(
    vrun: VirtualRun, page_size: int, depth: int
) -> None:  # C47
    async def main() -> None:
        a_b = prompt(1, 32)
        prompts = [a_b + prompt(2, 16), a_b + prompt(3, 16), a_b]
        engine = small_engine(
            None, slow_device(), page_size=page_size, overlap_depth=depth, prefill_chunk_tokens=48
        )
        async with engine:
            Watch(engine)
            streams = [engine.generate(ids, greedy(12)) for ids in prompts]
            before_plan(engine, {4: lambda: engine.abort(streams[0].request_id)})
            got = await asyncio.gather(*(tokens_of(stream) for stream in streams))
            assert got[1:] == [oracle(ids, 12) for ids in prompts[1:]]
            assert cached_pages(engine, a_b) == 32 // page_size
            await settle(engine)
            assert_baseline(engine)

    vrun(main())


@pytest.mark.parametrize("depth", DEPTHS[1:])
def test_a_prefix_is_shared_only_once_it_is_written(vrun: VirtualRun, depth: int) -> None:  # C48
    async def main() -> None:
        ids, model, device = prompt(1, 32), WatchedModel(), SimDevice()
        device.hold(step=1)
        async with small_engine(model, device, overlap_depth=depth) as engine:
            Watch(engine)
            second: list[TokenStream] = []
            before_plan(engine, {2: lambda: second.append(engine.generate(ids, greedy()))})
            first = engine.generate(ids, greedy())
            await device.reached(1, "stage")
            await turns()
            assert launches(device)[:2] == [1, 2]
            device.release()
            both = await asyncio.gather(tokens_of(first), tokens_of(second[0]))
            assert both == [oracle(ids, 8)] * 2
            # The second computes its own copy, beside the first that decodes.
            assert not set(model.steps[1].page_tables[0]) & set(model.steps[1].page_tables[1, :2])
            assert len(model.steps[1].positions) == 1 + 32

    vrun(main())
