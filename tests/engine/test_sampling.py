"""What shapes logits is exact at every depth: penalties, bias, bans, allowed ids, min_tokens.

Invariant 7: nothing that shapes logits lags behind the token that was sampled last, though the host
may not have seen that token yet.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import numpy as np
import pytest
from engines import (
    DEPTHS,
    PAGE_SIZES,
    WatchedModel,
    assert_baseline,
    greedy,
    launches,
    prompt,
    prompt_whose_answer_is_new_at,
    settle,
    small_engine,
    tokens_of,
    turns,
)
from sampling_reference import SignedModel, Staircase, answer, edit, retract_every, staircase

from aiosched import InvalidModelOutput, SamplingParams
from aiosched.device.sim import SimDevice
from aiosched.testing.hash_model import HashModel, oracle

PENALTIES = {
    "repetition": {"repetition_penalty": 100.0},
    "presence": {"presence_penalty": 2.0},
    "frequency": {"frequency_penalty": 2.0},
}
VOCAB = 24


async def complete(engine, *asks: tuple[Sequence[int], SamplingParams]) -> list[list[int]]:
    answers = await asyncio.gather(*(engine.complete(p, params) for p, params in asks))
    return [list(a.token_ids) for a in answers]


# Penalties ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("name", PENALTIES)
def test_no_count_is_missing_or_extra_at_any_place(vrun, name, depth, page_size):
    """C58: each place of the answer would differ if one count did."""
    p = [0, 1, 2, 3, 4, 5] * 3
    params = greedy(40 if name == "frequency" else 15, **PENALTIES[name])
    expected = answer(Staircase(VOCAB), p, params).tokens
    for place, token in enumerate(expected):
        seen = expected[:place]
        if place:  # as if the token in flight were not counted yet
            assert edit(staircase(VOCAB), p, seen[:-1], params).argmax() != token
        # as if it were counted twice
        assert edit(staircase(VOCAB), p, [*seen, token], params).argmax() != token
    # Only the repetition penalty counts the prompt.
    assert expected[0] == (6 if name == "repetition" else 0)

    async def main():
        async with small_engine(
            Staircase(VOCAB), overlap_depth=depth, page_size=page_size, prefill_chunk_tokens=7
        ) as engine:
            assert await complete(engine, (p, params), (p, params)) == [expected] * 2

    vrun(main())


@pytest.mark.invariant(7)
def test_invariant_7_penalties_count_tokens_that_the_host_has_not_seen(vrun):
    device = SimDevice()
    p, params = [1, 2, 3], greedy(12, frequency_penalty=2.0)

    async def main():
        async with small_engine(Staircase(VOCAB), device, overlap_depth=2) as engine:
            stream = engine.generate(p, params)
            device.hold(label="copy")
            await device.reached(1, "copy")
            await turns()
            assert launches(device) == [1, 2, 3]  # all three sampled, none seen
            assert stream._answer.requests[0].output == []
            device.release()
            assert await tokens_of(stream) == list(range(12))

    vrun(main())


@pytest.mark.parametrize("depth", DEPTHS)
def test_penalties_follow_the_oracle_through_chunks_neighbours_and_retractions(vrun, depth):
    """C58, C56"""
    draw = random.Random(3)
    model = SignedModel(logit_scale=1 / 256)
    asks = [
        (
            prompt(i, draw.randrange(1, 40)),
            greedy(
                16,
                repetition_penalty=draw.choice([1.0, 0.5, 1.7]),
                presence_penalty=draw.choice([0.0, -0.3, 0.6]),
                frequency_penalty=draw.choice([0.0, -0.2, 0.4]),
            ),
        )
        for i in range(16)
    ]

    async def main():
        async with small_engine(model, overlap_depth=depth, prefill_chunk_tokens=9) as engine:
            retract_every(engine, 3)
            answers = await complete(engine, *asks)
            for got, (p, params) in zip(answers, asks, strict=True):
                assert got == answer(model, p, params).tokens
            assert engine.stats().retractions > 10
            await settle(engine)
            assert_baseline(engine)

    vrun(main())


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_penalised_request_that_joins_and_leaves_changes_nobody_elses_tokens(vrun, depth):
    """C59"""
    model = WatchedModel()
    plain = [(prompt(i, 5 + i), greedy(30)) for i in range(3)]
    guest = (prompt(9, 6), greedy(6, frequency_penalty=2.0))

    async def main():
        async with small_engine(model, overlap_depth=depth) as engine:
            streams = [engine.generate(*ask) for ask in plain]
            begun = [(await anext(streams[0])).id for _ in range(8)]
            assert await complete(engine, guest) == [answer(model, *guest).tokens]
            rest, *others = await asyncio.gather(*map(tokens_of, streams))
            assert [begun + rest, *others] == [oracle(p, 30) for p, _ in plain]

    vrun(main())
    sizes = [len(step.rows) for step in model.steps]
    first, last = sizes.index(4), len(sizes) - sizes[::-1].index(4)
    assert 3 in sizes[:first] and 3 in sizes[last:]


# Bias, bans and allowed ids -----------------------------------------------------------------------


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_bias_bans_or_forces_a_token(vrun, depth):
    """C60"""
    p = prompt_whose_answer_is_new_at(2)
    third = oracle(p, 3)[2]
    banned, forced = greedy(20, logit_bias={third: -100}), greedy(20, logit_bias={17: 100})

    async def main():
        async with small_engine(overlap_depth=depth) as engine:
            without, only = await complete(engine, (p, banned), (p, forced))
            assert third not in without and without[:2] == oracle(p, 2)
            assert without == answer(HashModel(), p, banned).tokens
            assert only == [17] * 20

    vrun(main())


@pytest.mark.parametrize("ids", [[9, 4, 33], (4, 9, 33), {33, 4, 9}, range(4, 34, 14), [4] * 3])
@pytest.mark.parametrize("depth", DEPTHS)
def test_only_allowed_ids_are_chosen(vrun, depth, ids):
    """C60, with every kind of collection that SamplingParams takes."""
    p, params = prompt(1, 7), greedy(20, allowed_token_ids=ids)

    async def main():
        async with small_engine(overlap_depth=depth) as engine:
            (got,) = await complete(engine, (p, params))
            assert set(got) <= set(ids)
            assert got == answer(HashModel(), p, params).tokens

    vrun(main())


@pytest.mark.parametrize("length", [2, 3, 16])
@pytest.mark.parametrize("depth", DEPTHS)
def test_a_bad_word_is_banned_though_its_beginning_is_still_in_flight(vrun, depth, length):
    """C60"""
    p = prompt(5, 8)
    word = oracle(p, 18)[-length:]
    params = greedy(24, bad_words=[word])
    expected = answer(HashModel(), p, params).tokens
    assert expected[:17] == oracle(p, 17) and expected[17] != word[-1]

    async def main():
        async with small_engine(overlap_depth=depth) as engine:
            assert await complete(engine, (p, params), (p, greedy(24))) == [expected, oracle(p, 24)]

    vrun(main())


@pytest.mark.parametrize("depth", DEPTHS)
def test_bad_words_may_begin_before_a_retraction_but_not_in_the_prompt(vrun, depth):
    draw = random.Random(1)
    ids = range(6)
    words = [[draw.choice(ids) for _ in range(draw.randrange(2, 5))] for _ in range(6)]
    params = greedy(30, allowed_token_ids=ids, bad_words=words)
    prompts = [prompt(i, 5, vocab_size=6) + words[i][:-1] for i in range(6)]
    expected = [answer(HashModel(), p, params).tokens for p in prompts]
    assert any(got != answer(HashModel(), p, greedy(30, allowed_token_ids=ids)).tokens
               for got, p in zip(expected, prompts, strict=True))  # fmt: skip

    async def main():
        async with small_engine(overlap_depth=depth) as engine:
            retract_every(engine, 2)
            assert await complete(engine, *((p, params) for p in prompts)) == expected
            assert engine.stats().retractions > 5

    vrun(main())


@pytest.mark.parametrize("depth", DEPTHS)
def test_min_tokens_counts_results_that_are_pending_and_survives_a_retraction(vrun, depth):
    """The end tokens are banned for exactly so many tokens: most of the vocabulary here."""
    model = HashModel(eos_token_ids=(3, 40))
    asks = [
        (prompt(i, 6), greedy(20, min_tokens=i, stop_token_ids=range(10, 60))) for i in range(12)
    ]
    expected = [answer(model, *ask).tokens for ask in asks]
    assert [len(tokens) > i for i, tokens in enumerate(expected)] == [True] * 12
    assert any(len(tokens) == i + 1 for i, tokens in enumerate(expected))

    async def main():
        async with small_engine(model, overlap_depth=depth) as engine:
            retract_every(engine, 3)
            assert await complete(engine, *asks) == expected
            assert engine.stats().retractions

    vrun(main())


# What reaches the device --------------------------------------------------------------------------


@pytest.mark.parametrize("depth", DEPTHS)
def test_every_id_that_reaches_the_device_is_in_the_vocabulary(vrun, depth):
    """C61, with end tokens past the vocabulary, retractions and a request whose logits are NaN."""
    model = WatchedModel(eos_token_ids=(63, 64, 5000), faulty=62, record=True)
    asks = [
        (prompt(i, 5 + 3 * i, vocab_size=60), greedy(14, min_tokens=10, bad_words=[[62]]))
        for i in range(8)
    ]

    async def main():
        async with small_engine(model, overlap_depth=depth, prefill_chunk_tokens=8) as engine:
            retract_every(engine, 2)
            faulty = asyncio.ensure_future(engine.complete([1, 2, 62], greedy(14)))
            answers = await complete(engine, *asks)
            assert answers == [answer(model, p, params).tokens for p, params in asks]
            with pytest.raises(InvalidModelOutput):
                await faulty

    vrun(main())
    assert {token for _, _, token in model.seen} <= set(range(64))
    for step in model.steps:
        sampling = step.sampling
        named = [step.input_ids, *(ids for _, ids in sampling.allowed)]
        named += [] if sampling.bias_ids is None else [sampling.bias_ids]
        for reset in sampling.resets:
            named += [reset.prompt_ids, reset.output_ids]
        assert all(0 <= token < 64 for token in np.concatenate(named).tolist())
