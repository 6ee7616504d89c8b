"""Stop tokens, stop strings and end tokens: where an answer ends that nobody could foresee."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from engines import (
    DEPTHS,
    PAGE_SIZES,
    PieceTokenizer,
    assert_baseline,
    greedy,
    prompt,
    prompt_whose_answer_is_new_at,
    settle,
    small_engine,
    tokens_of,
)

from aiosched import FinishReason
from aiosched.testing.hash_model import HashModel, oracle, oracle_logits


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("place", [0, 1, 4])
def test_a_stop_token_ends_the_stream_and_at_most_depth_rows_more_are_run(
    vrun, monkeypatch, place, depth, page_size
):
    """C16, and invariant 4: visible tokens are the committed prefix, up to the finish."""
    p = prompt_whose_answer_is_new_at(place)
    expected = oracle(p, place + 1)
    model, tokenizer = HashModel(), PieceTokenizer({})
    model.tokenizer = tokenizer

    async def main():
        async with small_engine(model, overlap_depth=depth, page_size=page_size) as engine:
            made = 0
            make = engine._runtime.make_detokenizer

            def counting(skip: bool) -> Any:
                nonlocal made
                made += 1
                return make(skip)

            monkeypatch.setattr(engine._runtime, "make_detokenizer", counting)
            params = greedy(20, stop_token_ids=[expected[-1]])
            stream = engine.generate(p, params)
            tokens = [token async for token in stream]
            assert [token.id for token in tokens] == expected
            reasons = [token.finish_reason for token in tokens]
            assert reasons == [None] * place + [FinishReason.STOP]
            decoded = tokenizer.decoded
            await settle(engine)
            assert [token async for token in stream] == []
            assert (made, tokenizer.decoded) == (1, decoded)
            assert_baseline(engine)
            model.sampled.clear()
            late = engine.generate(p, params)
            await settle(engine)  # it reads when all results are in, the superfluous ones too
            assert await tokens_of(late) == expected

    vrun(main())
    rows_run = sum(model.sampled.values())
    assert place + 1 <= rows_run <= place + 1 + depth


async def deltas_of(engine: Any, ids: list[int], **params: Any) -> tuple[list[str], str]:
    tokens = [token async for token in engine.generate(ids, greedy(20, **params))]
    return [token.text for token in tokens], str(tokens[-1].finish_reason)


@pytest.mark.parametrize("depth", DEPTHS)
def test_no_part_of_a_stop_string_is_ever_shown(vrun, depth):
    """C19"""
    p = prompt_whose_answer_is_new_at(0, 1, 2, 3)
    a, st, op, end = oracle(p, 4)
    model = HashModel(eos_token_ids=(end,))
    model.tokenizer = PieceTokenizer({a: "a", st: " ST", op: "OP", end: "<end>"})

    async def main():
        async with small_engine(model, overlap_depth=depth) as engine:
            deltas, reason = await deltas_of(engine, p, stop="STOP")
            assert "".join(deltas) == "a "
            assert reason == "stop"
            assert not any("S" in delta for delta in deltas)
            answer = await engine.complete(p, greedy(20, stop=["STOP"]))
            assert (answer.text, answer.finish_reason) == ("a ", "stop")
            deltas, reason = await deltas_of(engine, p, stop="STOPS")  # held back, then shown
            assert ("".join(deltas), reason) == ("a STOP", "stop")

    vrun(main())


@pytest.mark.parametrize("width", [1, 2, 3])
@pytest.mark.parametrize(
    ("stop", "text", "shown"), [("aab", "aaab", "a"), ("abab", "abaabab", "aba")]
)
def test_a_stop_string_is_found_behind_its_own_beginning(vrun, stop, text, shown, width):
    """C20"""
    pieces = [text[i : i + width] for i in range(0, len(text), width)]
    p = prompt_whose_answer_is_new_at(*range(len(pieces)))
    model = HashModel()
    model.tokenizer = PieceTokenizer(dict(zip(oracle(p, len(pieces)), pieces, strict=True)))

    async def main():
        async with small_engine(model) as engine:
            deltas, reason = await deltas_of(engine, p, stop=stop)
            assert ("".join(deltas), reason) == (shown, "stop")
            answer = await engine.complete(p, greedy(20, stop=stop))
            assert answer.text == shown
            assert list(answer.token_ids) == oracle(p, len(pieces))

    vrun(main())


def masked_oracle(p: list[int], count: int, banned: set[int], until: int) -> list[int]:
    """The oracle's answer if ``banned`` may not be chosen before ``until`` tokens are out."""
    answer: list[int] = []
    while len(answer) < count:
        logits = oracle_logits([*p, *answer], 64)
        for token in banned if len(answer) < until else ():
            logits[token] = -1
        answer.append(logits.index(max(logits)))
    return answer


def tempting_prompt(place: int) -> tuple[list[int], int]:
    """A prompt and its third token, which the model would choose again at ``place``."""
    for seed in itertools.count():
        p = prompt(seed, 6)
        stop = oracle(p, 3)[2]
        if stop not in oracle(p, 2) and masked_oracle(p, place + 1, {stop}, place)[place] == stop:
            return p, stop
    raise AssertionError


@pytest.mark.parametrize("place", [4, 5])
@pytest.mark.parametrize("depth", DEPTHS)
def test_no_stop_token_is_chosen_before_min_tokens(vrun, depth, place):
    """C21: the fifth token may not be it, the sixth may."""
    p, stop = tempting_prompt(place)
    free = masked_oracle(p, 20, {stop}, 5)
    expected = free[: free.index(stop) + 1] if stop in free else free
    assert (len(expected) == 6) == (place == 5)

    async def main():
        async with small_engine(overlap_depth=depth) as engine:
            answer = await engine.complete(p, greedy(20, stop_token_ids=[stop], min_tokens=5))
            assert list(answer.token_ids) == expected

    vrun(main())


@pytest.mark.parametrize("depth", DEPTHS)
def test_every_end_token_of_the_model_ends_an_answer_unless_ignored(vrun, depth):
    """C21"""
    p = prompt_whose_answer_is_new_at(1, 3)
    answer = oracle(p, 6)

    async def main():
        async with small_engine(
            HashModel(eos_token_ids=(answer[3], answer[1])), overlap_depth=depth
        ) as engine:
            ended = await engine.complete(p, greedy(6))
            assert (list(ended.token_ids), ended.finish_reason) == (answer[:2], "stop")
            ignored = await engine.complete(p, greedy(6, ignore_eos=True))
            assert (list(ignored.token_ids), ignored.finish_reason) == (answer, "length")
        async with small_engine(
            HashModel(eos_token_ids=(63, answer[3])), overlap_depth=depth
        ) as engine:
            if 63 not in answer[:4]:
                assert list((await engine.complete(p, greedy(6))).token_ids) == answer[:4]

    vrun(main())
