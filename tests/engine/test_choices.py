"""The n answers of one prompt: they share its pages, and each is an answer of its own."""

from __future__ import annotations

import asyncio

import pytest
from engines import (
    DEPTHS,
    PAGE_SIZES,
    WatchedModel,
    assert_baseline,
    greedy,
    prompt,
    settle,
    small_engine,
    turns,
)
from sampling_reference import answer

from aiosched import InvalidModelOutput, SamplingParams
from aiosched.device.sim import SimDevice
from aiosched.testing.hash_model import HashModel, oracle


def lively(max_tokens: int, n: int, **fields) -> SamplingParams:
    return SamplingParams(temperature=2.0, seed=8, max_tokens=max_tokens, n=n, **fields)


def expected(p, params, model=None) -> list[list[int]]:
    model = model or HashModel()
    return [answer(model, p, params, choice).tokens for choice in range(params.n)]


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("depth", DEPTHS)
def test_four_choices_with_two_places_all_arrive(vrun, depth, page_size):
    """C71"""
    p, params = prompt(1, 37), lively(12, 4)

    async def main():
        async with small_engine(
            overlap_depth=depth, page_size=page_size, max_running_requests=2
        ) as engine:
            got: list[list[int]] = [[], [], [], []]
            reasons = []
            async for token in engine.generate(p, params):
                assert token.index == len(got[token.choice])
                got[token.choice].append(token.id)
                reasons += [token.finish_reason] if token.finish_reason else []
            assert got == expected(p, params)
            assert reasons == ["length"] * 4
            await settle(engine)
            assert_baseline(engine)

    vrun(main())


@pytest.mark.parametrize("depth", DEPTHS)
def test_the_pages_of_the_prompt_exist_once_and_are_computed_once(vrun, depth):
    """C71"""
    model, device = WatchedModel(record=True), SimDevice()
    p = prompt(1, 40)  # two pages and a half

    async def main():
        async with small_engine(model, device, overlap_depth=depth) as engine:
            stream = engine.generate(p, lively(30, 4))
            reader = asyncio.ensure_future(anext(stream))
            device.hold(step=12, label="forward")
            await device.reached(12)
            state = engine._runtime._state
            tables = state.table.page_table[[r.row for r in stream._answer.requests]]
            assert len({tuple(table[:2]) for table in tables.tolist()}) == 1
            own = [page for table in tables.tolist() for page in table[2:] if page]
            assert len(own) == len(set(own))
            stats = engine.stats()
            held = stats.kv_pages_total - stats.kv_pages_free - stats.kv_pages_cached
            assert held == 2 + len(own)
            await reader
            stream.abort()
            device.release()
            await settle(engine)
            assert_baseline(engine)

    vrun(main())
    read = [position for _, position, _ in model.seen if position < 40]
    assert sorted(read) == sorted([*range(32), *[*range(32, 40)] * 4])


@pytest.mark.parametrize("leave", ["break", "abort", "drop", "by id"])
@pytest.mark.parametrize("depth", DEPTHS)
def test_leaving_the_stream_frees_all_choices(run, depth, leave):
    """C71: with two of the four still waiting for a place."""
    device = SimDevice()

    async def main():
        async with small_engine(
            device=device, overlap_depth=depth, max_running_requests=2
        ) as engine:
            stream = engine.generate(prompt(1, 20), lively(200, 4), request_id="family")
            async for token in stream:
                if token.index == 3:
                    break
            if leave == "abort":
                stream.abort()
            elif leave == "by id":
                assert engine.abort("family") and not engine.abort("family")
            if leave != "by id":
                del stream
            await settle(engine)
            assert_baseline(engine)
            assert engine.stats().finished == {"abort": 4}
            assert list((await engine.complete([1, 2], greedy(5))).token_ids) == oracle([1, 2], 5)

    run(main())


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("depth", DEPTHS)
def test_a_choice_that_ends_early_leaves_the_prefix_to_the_others(vrun, depth, page_size):
    """C71: memory is short, and other prompts press for every page that is not held."""
    p = prompt(1, 32)
    params = lively(40, 3, stop_token_ids=range(5))
    answers = expected(p, params)
    assert len({len(tokens) for tokens in answers}) > 1
    others = [prompt(20 + i, 30) for i in range(6)]

    async def main():
        async with small_engine(
            overlap_depth=depth, page_size=page_size, kv_tokens=192, max_running_requests=4
        ) as engine:
            family, *rest = await asyncio.gather(
                engine.complete(p, params), *(engine.complete(q, greedy(9)) for q in others)
            )
            assert [list(choice.token_ids) for choice in family.choices] == answers
            assert [list(a.token_ids) for a in rest] == [oracle(q, 9) for q in others]
            await settle(engine)
            assert_baseline(engine)

    vrun(main())


@pytest.mark.parametrize("depth", DEPTHS)
def test_usage_counts_the_prompt_once_and_all_answers(vrun, depth):
    """C71"""
    p, params = prompt(1, 20), lively(20, 3, stop_token_ids=range(5))
    total = sum(map(len, expected(p, params)))

    async def main():
        async with small_engine(overlap_depth=depth) as engine:
            usage = (await engine.complete(p, params)).usage
            assert (usage.prompt_tokens, usage.completion_tokens) == (20, total)
            assert usage.cached_tokens == 0  # of its own prompt nothing was there before

    vrun(main())


@pytest.mark.parametrize("depth", DEPTHS)
def test_choices_go_on_when_the_first_is_retracted_while_it_reads_the_prompt(vrun, depth):
    """The others wait for the prompt to be read in; whoever reads it first must not stop them."""
    p, params = prompt(1, 60), lively(6, 3)
    device = SimDevice()

    async def main():
        async with small_engine(
            device=device, overlap_depth=depth, prefill_chunk_tokens=16
        ) as engine:
            stream = engine.generate(p, params)
            device.hold(step=2, label="forward")
            await device.reached(2)
            state = engine._runtime._state
            leader, *others = stream._answer.requests
            assert not leader.output and not any(r.row for r in others)
            state.retract(leader)
            device.release()
            await turns()
            completion = await stream
            assert [list(choice.token_ids) for choice in completion.choices] == expected(p, params)
            await settle(engine)
            assert_baseline(engine)

    vrun(main())


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_choice_that_fails_fails_the_whole_and_frees_it(vrun, depth):
    p, params = prompt(1, 20, vocab_size=60), lively(20, 4)
    model = HashModel(faulty=expected(p, params)[2][4])

    async def main():
        async with small_engine(model, overlap_depth=depth) as engine:
            with pytest.raises(InvalidModelOutput):
                await engine.complete(p, params)
            await settle(engine)
            assert_baseline(engine)

    vrun(main())
