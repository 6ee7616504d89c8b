"""KV memory: every page comes back, and none is handed out while a step may still touch it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from engines import (
    DEPTHS,
    PAGE_SIZES,
    PieceTokenizer,
    WatchedModel,
    assert_baseline,
    before_plan,
    greedy,
    launches,
    prompt,
    prompt_whose_answer_is_new_at,
    settle,
    slow_device,
    small_engine,
    tokens_of,
    turns,
)
from kv_audit import Watch, audit, state_of

from aiosched import InvalidModelOutput, KVCacheExhausted, PromptTooLong
from aiosched.request import FinishReason
from aiosched.testing.hash_model import HashModel, oracle

VirtualRun = Callable[[Coroutine[Any, Any, Any]], Any]
PROMPT = prompt_whose_answer_is_new_at(4, length=20)
ANSWER = oracle(PROMPT, 12)
COUNT = 10_000  # random requests in the long run


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("end", ["stop", "length", "stop string", "abort", "error"])
def test_every_end_brings_all_pages_back(
    vrun: VirtualRun, end: str, page_size: int, depth: int
) -> None:  # C40
    async def main() -> None:
        model = HashModel(faulty=ANSWER[4] if end == "error" else None)
        model.tokenizer = PieceTokenizer({ANSWER[4]: "END"})
        engine = small_engine(model, slow_device(), page_size=page_size, overlap_depth=depth)
        async with engine:
            Watch(engine)
            match end:
                case "stop":
                    done = await engine.complete(PROMPT, greedy(12, stop_token_ids=[ANSWER[4]]))
                    assert done.finish_reason is FinishReason.STOP
                case "stop string":
                    done = await engine.complete(PROMPT, greedy(12, stop="END"))
                    assert done.finish_reason is FinishReason.STOP
                case "length":
                    done = await engine.complete(PROMPT, greedy(12))
                    assert done.finish_reason is FinishReason.LENGTH
                case "abort":
                    stream = engine.generate(PROMPT, greedy(12))
                    async for token in stream:
                        if token.index == 4:
                            stream.abort()
                case "error":
                    with pytest.raises(InvalidModelOutput):
                        await engine.complete(PROMPT, greedy(12))
            await settle(engine)
            assert_baseline(engine)
            audit(state_of(engine))
            assert state_of(engine).table.free == state_of(engine).table.count

    vrun(main())


@pytest.mark.parametrize("depth", DEPTHS)
def test_the_last_token_needs_no_page(vrun: VirtualRun, depth: int) -> None:  # C41
    async def main() -> None:
        ids = prompt(1, 16)
        async with small_engine(None, slow_device(), kv_tokens=32, overlap_depth=depth) as engine:
            Watch(engine)
            assert list((await engine.complete(ids, greedy(17))).token_ids) == oracle(ids, 17)
            assert engine.stats().retractions == 0
            with pytest.raises(KVCacheExhausted):
                await engine.complete(ids, greedy(18))

    vrun(main())


def test_a_prompt_larger_than_the_pool_is_refused_before_anything_runs(
    vrun: VirtualRun,
) -> None:  # C42
    async def main() -> None:
        device = slow_device()
        async with small_engine(None, device, kv_tokens=64) as engine:
            with pytest.raises(PromptTooLong) as caught:
                engine.generate(prompt(1, 70), greedy())
            assert (caught.value.tokens, caught.value.limit) == (70, 64)
            await turns()
            assert not launches(device)
            ids = prompt(2, 10)
            assert list((await engine.complete(ids, greedy())).token_ids) == oracle(ids, 8)

    vrun(main())


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_a_request_that_outgrows_the_pool_gets_what_fits_then_its_own_error(
    vrun: VirtualRun, page_size: int, depth: int
) -> None:  # C43
    async def main() -> None:
        ids, next_ids = prompt(1, 30), prompt(2, 10)
        got: list[int] = []
        engine = small_engine(
            None, slow_device(), kv_tokens=64, page_size=page_size, overlap_depth=depth
        )
        async with engine:
            Watch(engine)
            stream = engine.generate(ids, greedy(100))
            waits = asyncio.ensure_future(engine.complete(next_ids, greedy(60)))
            with pytest.raises(KVCacheExhausted) as caught:
                async for token in stream:
                    assert token.id is not None
                    got.append(token.id)
            assert got == oracle(ids, 35)  # 64 slots, and the last token needs none
            assert (caught.value.tokens, caught.value.capacity) == (65, 64)
            assert "64" in str(caught.value)
            with pytest.raises(KVCacheExhausted):
                await waits
            done = await engine.complete(next_ids, greedy(55))
            assert list(done.token_ids) == oracle(next_ids, 55)
            await settle(engine)
            assert_baseline(engine)

    vrun(main())


@pytest.mark.parametrize("depth", DEPTHS[1:])
def test_nobody_is_retracted_for_pages_that_are_arriving(
    vrun: VirtualRun, depth: int
) -> None:  # C44
    async def main() -> None:
        model, prompts = WatchedModel(), [prompt(i, n) for i, n in enumerate((8, 4, 4, 4))]
        engine = small_engine(
            model,
            slow_device(),
            kv_tokens=30,
            page_size=1,
            overlap_depth=depth,
            prefix_cache=False,
        )
        async with engine:
            watch = Watch(engine)
            streams = [engine.generate(ids, greedy(6)) for ids in prompts]

            def make_it_scarce() -> None:
                engine.abort(streams[0].request_id)
                pool = state_of(engine).memory.pool
                assert (pool.free, pool.arriving) == (2, 10)

            before_plan(engine, {4: make_it_scarce})
            rest = await asyncio.gather(*(tokens_of(stream) for stream in streams[1:]))
            assert rest == [oracle(ids, 6) for ids in prompts[1:]]
            assert engine.stats().retractions == 0
            assert len(model.batches[3]) == 2  # of three: one waits for a page to arrive
            assert watch.barren <= depth + 2

    vrun(main())


@pytest.mark.invariant(2)
@pytest.mark.parametrize("depth", DEPTHS)
def test_pages_and_rows_are_reused_only_behind_the_last_step_that_names_them(
    vrun: VirtualRun, depth: int
) -> None:  # invariant 2
    """``Watch`` compares each page and row that is handed out with what steps in flight name."""

    async def main() -> None:
        engine = small_engine(None, slow_device(), kv_tokens=96, page_size=4, overlap_depth=depth)
        async with engine:
            watch = Watch(engine)
            watch.retract_every(3, most=20)

            async def customer(i: int) -> None:
                ids, got = prompt(i, 3 + i % 20), []
                async for token in engine.generate(ids, greedy(9)):
                    got.append(token.id)
                    if len(got) == 9 - i % 4:  # some leave with steps in flight
                        break
                assert got == oracle(ids, len(got))

            await asyncio.gather(*(customer(i) for i in range(40)))
            await settle(engine)
            assert_baseline(engine)
            assert watch.steps > 40

    vrun(main())


def test_every_page_is_accounted_for_in_each_turn_of_a_long_run(vrun: VirtualRun) -> None:  # C49
    async def main() -> None:
        engine = small_engine(
            None,
            slow_device(),
            kv_tokens=512,
            page_size=4,
            prefill_chunk_tokens=256,
            max_running_requests=64,
            max_queued_requests=COUNT,
        )
        async with engine:
            Watch(engine)
            prompts = [prompt(i % 97, 1 + i % 13) for i in range(COUNT)]
            streams = [engine.generate(ids, greedy(1 + i % 3)) for i, ids in enumerate(prompts)]
            done = await asyncio.gather(*(_await(stream) for stream in streams))
            for i, completion in enumerate(done[::100]):
                ids = prompts[100 * i]
                assert list(completion.token_ids) == oracle(ids, 1 + 100 * i % 3)
            await settle(engine)
            assert_baseline(engine)

    vrun(main())


async def _await(stream: Any) -> Any:
    return await stream
