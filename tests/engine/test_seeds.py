"""Randomness is a counter: a draw depends on (seed, position) alone.

Not on the batch around it, the order of arrival, the depth, a retraction, or how the tokens before
it came to be there.
"""

from __future__ import annotations

import asyncio
import random

import pytest
from engines import DEPTHS, PAGE_SIZES, assert_baseline, prompt, settle, small_engine, tokens_of
from sampling_reference import answer, retract_every

from aiosched import SamplingParams
from aiosched.testing.hash_model import HashModel


def lively(seed: int | None, max_tokens: int = 7, **fields) -> SamplingParams:
    return SamplingParams(temperature=2.0, seed=seed, max_tokens=max_tokens, **fields)


FILTERS = [{}, {"top_p": 0.9}, {"top_k": 12}, {"min_p": 0.05}, {"frequency_penalty": 0.5}]
ASKS = [(prompt(i, 3 + 2 * i), lively(i // 2, **FILTERS[i % 5])) for i in range(12)]
EXPECTED = [answer(HashModel(), *ask).tokens for ask in ASKS]


@pytest.mark.parametrize("crowd", [0, 1, 7])
@pytest.mark.parametrize("depth", DEPTHS)
def test_seeded_requests_do_not_depend_on_their_order_or_on_neighbours(vrun, depth, crowd):
    """C67"""

    async def main():
        async with small_engine(overlap_depth=depth, prefill_chunk_tokens=24) as engine:
            for order in range(5):
                places = random.Random(order).sample(range(12), 12)
                streams = {}
                for place in places:
                    streams[place] = engine.generate(*ASKS[place])
                    if len(streams) <= crowd:
                        streams[-len(streams)] = engine.generate(prompt(9, 5), lively(None, 9))
                answers = await asyncio.gather(*map(tokens_of, streams.values()))
                got = dict(zip(streams, answers, strict=True))
                assert [got[place] for place in range(12)] == EXPECTED
            await settle(engine)
            assert_baseline(engine)

    vrun(main())


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("depth", DEPTHS)
def test_seeded_requests_do_not_depend_on_retractions(vrun, depth, page_size):
    async def main():
        async with small_engine(overlap_depth=depth, page_size=page_size) as engine:
            retract_every(engine, 2)
            answers = await asyncio.gather(*(engine.complete(*ask) for ask in ASKS))
            assert [list(a.token_ids) for a in answers] == EXPECTED
            assert engine.stats().retractions > 4

    vrun(main())


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_draw_depends_on_seed_and_position_alone(vrun, depth):
    """A prompt that ends with the first tokens of an answer is answered with the rest of it."""
    p = prompt(4, 9)

    async def main():
        async with small_engine(overlap_depth=depth) as engine:
            whole = list((await engine.complete(p, lively(77, 12))).token_ids)
            for cut in (1, 5, 11):
                rest = await engine.complete(p + whole[:cut], lively(77, 12 - cut))
                assert list(rest.token_ids) == whole[cut:]

    vrun(main())


@pytest.mark.parametrize("depth", DEPTHS)
def test_one_seed_and_one_prompt_give_the_same_tokens_and_other_seeds_others(vrun, depth):
    """C67"""
    p = prompt(4, 9)

    async def main():
        async with small_engine(overlap_depth=depth) as engine:
            seeds = [5, 5, 6, 2**63 - 1, 0]
            answers = await asyncio.gather(*(engine.complete(p, lively(s)) for s in seeds))
            tokens = [a.token_ids for a in answers]
            assert tokens[0] == tokens[1]
            assert len(set(tokens)) == 4

    vrun(main())


def test_requests_without_a_seed_differ(vrun):
    async def main():
        async with small_engine() as engine:
            p = prompt(4, 9)
            answers = await asyncio.gather(*(engine.complete(p, lively(None)) for _ in range(8)))
            assert len({a.token_ids for a in answers}) == 8

    vrun(main())


@pytest.mark.parametrize("depth", DEPTHS)
def test_each_choice_has_a_stream_of_draws_of_its_own(vrun, depth):
    """The first is the answer of ``n`` 1; all are the same each time, also through retractions."""
    p = prompt(4, 20)
    expected = [answer(HashModel(), p, lively(3), choice).tokens for choice in range(4)]
    assert len({*map(tuple, expected)}) == 4

    async def main():
        for retracting in (False, True):
            async with small_engine(overlap_depth=depth, max_running_requests=3) as engine:
                if retracting:
                    retract_every(engine, 3)
                completion = await engine.complete(p, lively(3, n=4))
                assert [list(c.token_ids) for c in completion.choices] == expected
                few = await engine.complete(p, lively(3, n=2))
                assert few.choices == completion.choices[:2]

    vrun(main())


@pytest.mark.parametrize("depth", DEPTHS)
def test_greedy_rows_beside_rows_that_draw_stay_greedy(vrun, depth):
    p = prompt(2, 6)
    plain = SamplingParams(temperature=0.0, seed=1, top_p=0.5, top_k=3, min_p=0.9, max_tokens=7)
    expected = answer(HashModel(), p, plain).tokens

    async def main():
        async with small_engine(overlap_depth=depth) as engine:
            answers = await asyncio.gather(
                *(engine.complete(*ask) for ask in [*ASKS[:3], (p, plain), *ASKS[3:6]])
            )
            assert [list(a.token_ids) for a in answers] == [*EXPECTED[:3], expected, *EXPECTED[3:6]]

    vrun(main())
