"""Parameters together: every pair works as each alone would have it, or is refused by name."""

from __future__ import annotations

import asyncio
import random
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from engines import assert_baseline, greedy, prompt, settle, small_engine
from sampling_reference import (
    LETTERS,
    ByteTokenizer,
    SignedModel,
    answer,
    edit,
    log_softmax,
    logits_of,
    retract_every,
)

from aiosched import InvalidRequest, SamplingParams
from aiosched.submission import RequestFactory

EOS = (3, 40)


class Model(SignedModel):
    def __init__(self) -> None:
        super().__init__(64, eos_token_ids=EOS, logit_scale=1 / 128)
        self.tokenizer: Any = ByteTokenizer(LETTERS, special=[7])


# Pairs that work ----------------------------------------------------------------------------------

FEATURES: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 1.5, "seed": 4},
    "top_p": {"top_p": 0.8},
    "top_k": {"top_k": 7},
    "min_p": {"min_p": 0.1},
    "repetition_penalty": {"repetition_penalty": 1.6},
    "presence_penalty": {"presence_penalty": 1.0},
    "frequency_penalty": {"frequency_penalty": -0.4},
    "logit_bias": {"logit_bias": {12: 2.0, 20: -100.0, 21: 1.5}},
    "stop": {"stop": ["ca", "bbc"]},
    "stop_token_ids": {"stop_token_ids": range(14, 22)},
    "include_stop": {"include_stop": True},
    "min_tokens": {"min_tokens": 5},
    "ignore_eos": {"ignore_eos": True},
    "logprobs": {"logprobs": 2},
    "prompt_logprobs": {"prompt_logprobs": 1},
    "n": {"n": 2},
    "allowed_token_ids": {"allowed_token_ids": range(2, 60, 3)},
    "bad_words": {"bad_words": [[5], [14, 8], *([i, 17] for i in range(64))]},
    "stream_interval": {"stream_interval": 3},
    "skip_special_tokens": {"skip_special_tokens": False, "logit_bias": {7: 3.0}},
}
ASKS = [
    (
        prompt(i, 3 + i % 30),
        SamplingParams(
            **{"temperature": 0.0, "max_tokens": 10, "seed": 9} | FEATURES[one] | FEATURES[other]
        ),
    )
    for i, (one, other) in enumerate(combinations(FEATURES, 2))
]
EXPECTED = [
    [answer(Model(), p, params, choice) for choice in range(params.n)] for p, params in ASKS
]


@pytest.mark.parametrize(("depth", "retracting"), [(0, False), (1, True), (2, False), (2, True)])
def test_every_pair_of_parameters_gives_the_oracles_answer(vrun, depth, retracting):
    """C62: all pairs at once, so that each stands in batches with many others."""
    model = Model()

    async def main():
        async with small_engine(
            model, overlap_depth=depth, max_running_requests=24, kv_tokens=2048
        ) as engine:
            if retracting:
                retract_every(engine, 3)
            completions = await asyncio.gather(*(engine.complete(*ask) for ask in ASKS))
            for completion, answers, (p, params) in zip(completions, EXPECTED, ASKS, strict=True):
                for choice, wanted in zip(completion.choices, answers, strict=True):
                    assert list(choice.token_ids) == wanted.tokens, params
                    assert (choice.finish_reason, choice.text) == (wanted.reason, wanted.text)
                    if params.logprobs is None:
                        assert choice.logprobs is None
                    else:
                        given = [logprob.logprob for logprob in choice.logprobs]
                        assert given == pytest.approx(wanted.logprobs, abs=1e-5)
                if params.prompt_logprobs is not None:
                    given = [logprob.logprob for logprob in completion.prompt_logprobs]
                    rows = (log_softmax(logits_of(model, p[:i])) for i in range(1, len(p)))
                    wanted = [row[token] for row, token in zip(rows, p[1:], strict=True)]
                    assert given == pytest.approx(wanted, abs=1e-5)
            assert (engine.stats().retractions > 20) is retracting
            await settle(engine)
            assert_baseline(engine)

    vrun(main())


# Nothing is ignored -------------------------------------------------------------------------------

LIVELY = {"temperature": 1.5, "seed": 4}
# field: (what stands beside it, its value there, a value that must make a difference)
EFFECTS: dict[str, tuple[dict[str, Any], Any, Any]] = {
    "temperature": ({"seed": 4}, 0.0, 1.5),
    "top_p": (LIVELY, 1.0, 0.1),
    "top_k": (LIVELY, 0, 1),
    "min_p": (LIVELY, 0.0, 0.9),
    "repetition_penalty": ({}, 1.0, 90.0),
    "presence_penalty": ({}, 0.0, -2.0),
    "frequency_penalty": ({}, 0.0, -2.0),
    "logit_bias": ({}, None, {12: 90.0}),
    "seed": (LIVELY, 4, 5),
    "stop": ({}, (), ["a", "b"]),
    "stop_token_ids": ({}, (), range(4, 64)),
    "include_stop": ({"stop": ["a", "b", "c"]}, False, True),
    "min_tokens": ({"stop_token_ids": range(4, 60)}, 0, 6),
    "max_tokens": ({}, 2, 3),
    "ignore_eos": ({"logit_bias": {3: 90.0}}, False, True),
    "logprobs": ({}, None, 1),
    "prompt_logprobs": ({}, None, 1),
    "n": ({}, 1, 2),
    "allowed_token_ids": ({}, None, [50, 51]),
    "bad_words": ({}, (), [[i] for i in range(50)]),
    "skip_special_tokens": ({"logit_bias": {7: 90.0}}, True, False),
}


def test_no_field_is_ignored_in_silence(vrun):
    """C62"""
    # An interval changes when the reader is woken and nothing else: see test_text.
    assert {*EFFECTS, "stream_interval"} == {*SamplingParams.__struct_fields__}

    async def main():
        async with small_engine(Model(), prefix_cache=False) as engine:
            for field, (beside, *values) in EFFECTS.items():
                common = {"temperature": 0.0, "max_tokens": 10} | beside
                one, other = [
                    await engine.complete(
                        prompt(1, 6), SamplingParams(**common | {field: value}), request_id="same"
                    )
                    for value in values
                ]
                assert one != other, field

    vrun(main())


# Pairs that are refused ---------------------------------------------------------------------------

ALL = range(64)
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"min_tokens": 7, "max_tokens": 6}, "min_tokens", "max_tokens"),
    ({"allowed_token_ids": [5, 6], "bad_words": [[5], [6]]}, "allowed_token_ids", "bad_words"),
    ({"allowed_token_ids": [5], "bad_words": [[5, 5, 5]]}, "allowed_token_ids", "bad_words"),
    ({"allowed_token_ids": [3, 40], "min_tokens": 1}, "min_tokens", "allowed_token_ids"),
    (
        {"allowed_token_ids": [5, 6], "stop_token_ids": [5, 6], "min_tokens": 2},
        "min_tokens",
        "allowed_token_ids",
    ),
    (
        {"allowed_token_ids": [5, 3], "bad_words": [[5, 5]], "min_tokens": 2},
        "min_tokens",
        "bad_words",
    ),
    ({"stop_token_ids": ALL, "min_tokens": 1}, "min_tokens", "stop_token_ids"),
    ({"bad_words": [[i] for i in ALL]}, "bad_words", "leave a token"),
    ({"bad_words": [[9, i] for i in ALL]}, "bad_words", "leave a token"),
    ({"stop": "x"}, "stop", "tokenizer"),
    ({"bad_words": ["x"]}, "bad_words", "tokenizer"),
]


@pytest.mark.parametrize(("fields", "name", "other"), REFUSED)
def test_a_combination_that_cannot_work_is_refused_by_both_names(vrun, fields, name, other):
    """C62: at submission, before anything runs; the engine goes on."""
    model = SignedModel(64, eos_token_ids=EOS)

    async def main():
        async with small_engine(model) as engine:
            with pytest.raises(InvalidRequest) as caught:
                engine.generate([1, 2], greedy(**{"max_tokens": 10} | fields))
            assert caught.value.field == name and other in str(caught.value)
            assert engine.stats().waiting == 0
            assert len((await engine.complete([1, 2], greedy(3, ignore_eos=True))).token_ids) == 3

    vrun(main())


def test_a_priority_is_refused_under_the_policy_that_has_none(vrun):
    async def main():
        async with small_engine(policy="fifo") as engine:
            with pytest.raises(InvalidRequest, match=r"priority=1.*fifo"):
                engine.generate([1], priority=1)

    vrun(main())


def test_bad_words_are_refused_exactly_if_some_answer_would_come_to_a_dead_end():
    """Held to trying out every answer over a few ids."""
    factory = RequestFactory(
        vocab_size=8,
        eos_token_ids=(2,),
        tokenizer=None,
        max_model_len=99,
        max_unread_tokens=9,
        priority_aging=1.0,
        priorities=False,
    )
    draw = random.Random(0)
    seen = set()
    for _ in range(300):
        allowed = draw.sample(range(4), draw.randrange(1, 4))
        ids = [*allowed, 5]
        lengths = [draw.randrange(1, 4) for _ in range(draw.randrange(1, 8))]
        words = [[draw.choice(ids) for _ in range(length)] for length in lengths]
        least = draw.choice([0, 0, 3])
        params = greedy(bad_words=words, allowed_token_ids=allowed, min_tokens=least)
        dead = has_dead_end([], params)
        seen.add((dead, bool(least)))
        if dead:
            with pytest.raises(InvalidRequest):
                factory.check(params, 0, None)
        else:
            factory.check(params, 0, None)
    assert len(seen) == 4


def has_dead_end(output: list[int], params: SamplingParams) -> bool:
    """Whether an answer that begins like this can come to have no token left."""
    left = edit(np.zeros(8, np.float32), [0], output, params, (2,)) == 0
    if not left.any():
        return True
    return len(output) < 4 and any(
        has_dead_end([*output, token], params) for token in np.flatnonzero(left).tolist()
    )
