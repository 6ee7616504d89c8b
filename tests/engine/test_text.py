"""Text arrives whole: joined deltas are the decoded answer, and no delta holds half a character."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import pytest
from engines import DEPTHS, greedy, prompt, settle, small_engine
from sampling_reference import LETTERS, Answer, ByteTokenizer, answer, retract_every

from aiosched import SamplingParams, Token
from aiosched.device.sim import SimDevice
from aiosched.testing.hash_model import HashModel

TEXT = "A 世ab👨‍👩‍👧é"
BYTES = TEXT.encode()


class Successor(HashModel):
    """After each token comes the next id: a prompt names the place in the pieces to speak from."""

    def __init__(self, pieces: Sequence[bytes], special: Sequence[int] = ()) -> None:
        super().__init__(len(pieces), max_model_len=2**15)
        self.tokenizer: Any = ByteTokenizer(pieces, special)

    def forward(self, inputs: Any, kv: object) -> Any:
        logits = super().forward(inputs, kv).zero_()
        following = (inputs.input_ids[inputs.logits_index] + 1) % self.vocab_size
        return logits.scatter_(1, following[:, None], 1.0)


class Talker(HashModel):
    """A HashModel of which each token is a letter or two, so that stops cut through tokens."""

    def __init__(self, **options: Any) -> None:
        super().__init__(64, **options)
        self.tokenizer: Any = ByteTokenizer(LETTERS, special=[7])


def cuts(count: int) -> Iterator[list[bytes]]:
    """The bytes of the text cut in some ways: each byte, whole, and at random."""
    draw = random.Random(0)
    for _ in range(count):
        places = sorted(draw.sample(range(1, len(BYTES)), draw.randrange(len(BYTES))))
        yield [BYTES[a:b] for a, b in pairwise([0, *places, len(BYTES)])]
    yield [BYTES[i : i + 1] for i in range(len(BYTES))]
    yield [BYTES]


async def read(stream: Any) -> list[Token]:
    return [token async for token in stream]


# Characters ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", DEPTHS)
def test_no_delta_holds_half_a_character_however_it_is_cut_into_tokens(vrun, depth):
    """C69, C55"""
    spoken = list(cuts(20))
    pieces = [piece for cut in spoken for piece in [b"|", *cut]]
    starts = [i for i, piece in enumerate(pieces) if piece == b"|"]

    async def main():
        async with small_engine(Successor(pieces), overlap_depth=depth) as engine:
            retract_every(engine, 4)
            streams = [
                engine.generate([at], greedy(len(cut), stop="|" if at % 2 else ()))
                for at, cut in zip(starts, spoken, strict=True)
            ]
            for tokens, cut in zip(await asyncio.gather(*map(read, streams)), spoken, strict=True):
                assert [len(tokens), "".join(t.text for t in tokens)] == [len(cut), TEXT]
                sent = 0
                for i, token in enumerate(tokens):
                    assert "\N{REPLACEMENT CHARACTER}" not in token.text
                    sent += len(token.text.encode())
                    arrived = len(b"".join(cut[: i + 1]))
                    assert sent <= arrived < sent + 4  # held: at most part of one character
            assert engine.stats().retractions

    vrun(main())


@pytest.mark.parametrize("depth", DEPTHS)
def test_text_of_the_prompt_is_in_no_delta(vrun, depth):
    """C70: the prompt ends inside a character, and inside a word."""
    pieces = ["世".encode()[:1], "世".encode()[1:], b"wor", b"ld", b"!"]

    async def main():
        async with small_engine(Successor(pieces), overlap_depth=depth) as engine:
            inside = await read(engine.generate([0], greedy(2)))
            assert "".join(t.text for t in inside) == pieces[1].decode(errors="replace") + "wor"
            assert [t.text for t in await read(engine.generate([2], greedy(2)))] == ["ld", "!"]

    vrun(main())


@pytest.mark.parametrize("stop", [(), "never"])
def test_tokens_that_complete_no_character_cost_the_same_each(vrun, stop):
    """C70, counted in decoded ids: the work for a token does not grow with the answer."""
    model = Successor([b"\xf0", b"\x9f", b"\x91"])
    costs = []

    async def main():
        async with small_engine(model, overlap_depth=1) as engine:
            for length in (50, 200):
                model.tokenizer.decoded = 0
                tokens = await read(engine.generate([0], greedy(length, stop=stop)))
                costs.append(model.tokenizer.decoded / length)
                ids = [token.id for token in tokens]
                assert "".join(t.text for t in tokens) == model.tokenizer.decode(ids)
            assert costs[1] <= 1.1 * costs[0] < 100

    vrun(main())


# Stop strings, stop tokens and special tokens -----------------------------------------------------

STOPS: list[dict[str, Any]] = [
    {"stop": "cab"},
    {"stop": ["bcc", "aaaa", "cabb"], "include_stop": True},
    {"stop": "ca", "min_tokens": 9},
    {"stop": "bb", "stop_token_ids": range(20, 30)},
    {"stop_token_ids": range(20, 40), "include_stop": True},
    {"stop": "nothing of the kind", "stop_token_ids": range(30, 40), "min_tokens": 3},
    {"skip_special_tokens": False, "stop": "<end>", "logit_bias": {7: 4.0}},
    {"skip_special_tokens": False, "stop": "d>", "include_stop": True, "logit_bias": {7: 4.0}},
    {"logit_bias": {7: 4.0}, "frequency_penalty": 1.0},
    {"skip_special_tokens": False, "stop": "cc<", "logit_bias": {7: 4.0}},
]


@pytest.mark.parametrize("retracting", [False, True])
@pytest.mark.parametrize("depth", DEPTHS)
def test_text_ends_where_its_stop_rule_says(vrun, depth, retracting):
    model = Talker()
    asks = [
        (prompt(i, 5 + i), greedy(40, stream_interval=1 + i % 3, **fields))
        for i, fields in enumerate(STOPS * 2)
    ]
    expected = [answer(model, *ask) for ask in asks]
    assert {(e.reason, len(e.tokens) < 40) for e in expected} == {("stop", True), ("length", False)}

    async def main():
        async with small_engine(model, overlap_depth=depth) as engine:
            if retracting:
                retract_every(engine, 3)
            streams = [engine.generate(*ask) for ask in asks]
            for tokens, wanted in zip(await asyncio.gather(*map(read, streams)), expected,
                                      strict=True):  # fmt: skip
                text = "".join(token.text for token in tokens)
                ids = [token.id for token in tokens]
                assert Answer(ids, tokens[-1].finish_reason, text, wanted.logprobs) == wanted
            for stream, wanted in zip(streams, expected, strict=True):
                (choice,) = (await stream).choices
                assert (choice.text, list(choice.token_ids)) == (wanted.text, wanted.tokens)
            await settle(engine)

    vrun(main())
    ran = sum(model.sampled.values()) - sum(len(e.tokens) for e in expected)
    if not retracting:
        assert 0 <= ran <= depth * len(asks)


@pytest.mark.parametrize("depth", DEPTHS)
def test_no_delta_shows_any_of_a_stop_string(vrun, depth):
    model, params = Talker(), greedy(40, stop="cab")
    p = next(p for i in range(99) if len(answer(model, p := prompt(i, 5), params).text) > 12)

    async def main():
        async with small_engine(model, overlap_depth=depth) as engine:
            tokens = await read(engine.generate(p, params))
            text = answer(model, p, params).text
            shown = ""
            for token in tokens:
                shown += token.text
                assert text.startswith(shown)

    vrun(main())


# Intervals ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", [(), "never"])
@pytest.mark.parametrize("depth", DEPTHS)
def test_stream_interval_wakes_the_reader_with_several_tokens_and_loses_none(
    vrun, clock, depth, stop
):
    model, device = Talker(), SimDevice(forward_time=1.0)
    params = greedy(9, stream_interval=3, stop=stop)

    async def main():
        async with small_engine(model, device, overlap_depth=depth) as engine:
            times, tokens = [], []
            async for token in engine.generate(prompt(1, 5), params):
                times.append(round(clock.time()))
                tokens.append(token)
            assert times == [1, 4, 4, 4, 7, 7, 7, 9, 9]  # the first and the last come at once
            whole = answer(model, prompt(1, 5), params)
            assert "".join(t.text for t in tokens) == whole.text
            assert [t.id for t in tokens] == whole.tokens

    vrun(main())


def test_text_needs_no_tokenizer_unless_it_is_asked_for(vrun):
    async def main():
        async with small_engine() as engine:
            tokens = await read(engine.generate([1, 2], SamplingParams(max_tokens=3)))
            assert [t.text for t in tokens] == ["", "", ""]

    vrun(main())
