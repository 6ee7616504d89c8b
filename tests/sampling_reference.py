"""What an engine must answer, in plain numpy: every field of SamplingParams, one token at a time.

No batch, no pages, no overlap: an answer is a function of prompt and params, and each token one of
the answer before it. Engines are held to it at every depth.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
from engines import PieceTokenizer
from numpy.typing import NDArray

from aiosched import Engine, FinishReason, SamplingParams
from aiosched.model.draws import derive_seed, uniform_draws
from aiosched.scheduler.requests import Request
from aiosched.testing.hash_model import HashModel, oracle_logits

Array32 = NDArray[np.float32]


class SignedModel(HashModel):
    """A HashModel whose logits have both signs, which the repetition penalty tells apart."""

    def forward(self, inputs: Any, kv: object) -> Any:
        return super().forward(inputs, kv) - 512 * self.logit_scale


class Staircase(HashModel):
    """Each logit is a step below that of the id before it, whatever was read.

    So the best of the ids that no penalty holds down is next, and one count too few or too many at
    any place changes the choice there.
    """

    def forward(self, inputs: Any, kv: object) -> Any:
        stairs = super().forward(inputs, kv)
        stairs[:] = stairs.new_tensor(staircase(self.vocab_size))
        return stairs


class ByteTokenizer(PieceTokenizer):
    """Each id is some bytes; ``special`` ids have text that is skipped."""

    def __init__(self, pieces: Sequence[bytes], special: Sequence[int] = ()) -> None:
        super().__init__({}, len(pieces))
        self.bytes = list(pieces)
        self.special_ids = frozenset(special)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        self.decoded += len(ids)
        skipped = self.special_ids if skip_special_tokens else ()
        return b"".join(self.bytes[i] for i in ids if i not in skipped).decode(errors="replace")


LETTERS = [("abc"[i % 3] + "ab"[: i % 2]).encode() for i in range(64)]
"""Pieces for the ids of a HashModel. Stop strings cut through them; 7 is meant to be special."""
LETTERS[7] = b"<end>"


def staircase(vocab_size: int) -> Array32:
    return np.arange(vocab_size, 0, -1, dtype=np.float32) / np.float32(vocab_size)


def logits_of(model: HashModel, tokens: Sequence[int]) -> Array32:
    """What ``model`` must say after ``tokens``."""
    if isinstance(model, Staircase):
        return staircase(model.vocab_size)
    logits = np.array(oracle_logits(tokens, model.vocab_size), np.float32)
    scale = np.float32(model.logit_scale)
    return logits * scale - (512 * scale if isinstance(model, SignedModel) else np.float32(0))


class Answer(NamedTuple):
    tokens: list[int]
    reason: FinishReason
    text: str
    logprobs: list[float]


def answer(
    model: HashModel, prompt: Sequence[int], params: SamplingParams, choice: int = 0
) -> Answer:
    """One choice of the answer, in full. ``model.tokenizer`` decodes ids one by one."""
    output: list[int] = []
    logprobs: list[float] = []
    text, reason = "", FinishReason.LENGTH
    ends = {*params.stop_token_ids, *(() if params.ignore_eos else model.eos_token_ids)}
    watched_from = 0  # stop strings count in the text from here on
    while len(output) < (params.max_tokens or 2**31) and reason is FinishReason.LENGTH:
        logits = logits_of(model, [*prompt, *output])
        edited = edit(logits, prompt, output, params, model.eos_token_ids)
        token = int(edited.argmax())
        if params.temperature:
            token = draw(edited, len(prompt) + len(output), params, choice)
        output.append(token)
        logprobs.append(float(log_softmax(logits)[token]))
        if token in ends:
            reason = FinishReason.STOP
            if not params.include_stop:
                break
        if model.tokenizer is not None:
            text += model.tokenizer.decode([token], params.skip_special_tokens)
        if len(output) < params.min_tokens:
            watched_from = len(text)
            continue
        found = [
            (place + len(stop), place)
            for stop in params.stop_strings
            if (place := text.find(stop, watched_from)) >= 0
        ]
        if found:
            end, start = min(found)
            text = text[: end if params.include_stop else start]
            reason = FinishReason.STOP
    return Answer(output, reason, text, logprobs)


def edit(
    logits: Array32,
    prompt: Sequence[int],
    output: Sequence[int],
    params: SamplingParams,
    eos_token_ids: Sequence[int] = (),
) -> Array32:
    """Logits after penalties, bias and bans. Only the repetition penalty counts the prompt."""
    edited = logits.copy()
    factor = np.float32(params.repetition_penalty)
    for token in {*prompt, *output}:
        value = edited[token]
        edited[token] = value / factor if value > 0 else value * factor
    for token, count in Counter(output).items():
        edited[token] -= np.float32(params.frequency_penalty) * np.float32(count)
        edited[token] -= np.float32(params.presence_penalty)
    for token, bias in (params.logit_bias or {}).items():
        edited[token] += np.float32(bias)
    banned: set[int] = set()
    if len(output) < params.min_tokens:
        banned |= {*eos_token_ids, *params.stop_token_ids}
    if params.allowed_token_ids is not None:
        banned |= {*range(len(logits))} - {*params.allowed_token_ids}
    for word in params.bad_words:
        assert not isinstance(word, str)
        if list(output[len(output) - len(word) + 1 :]) == list(word[:-1]) or len(word) == 1:
            banned.add(word[-1])
    edited[[token for token in banned if token < len(edited)]] = -np.inf
    return edited


def draw(edited: Array32, position: int, params: SamplingParams, choice: int = 0) -> int:
    """The token that (seed, position) draws: the inverse of the distribution function."""
    assert params.seed is not None
    seed = np.array([derive_seed(params.seed, choice)], np.uint64)
    u = float(uniform_draws(seed, np.array([position]))[0])
    below = np.cumsum(kept_probabilities(edited, params))
    return int(np.searchsorted(below, u * below[-1], side="right"))


def kept_probabilities(edited: Array32, params: SamplingParams) -> NDArray[np.float64]:
    """Temperature, then top_k, top_p and min_p, by their definitions; not normalised."""
    x = edited.astype(np.float64) / params.temperature
    p = np.exp(x - x.max())
    if params.top_k > 0:
        p[p < np.sort(p)[-min(params.top_k, len(p))]] = 0
    order = np.argsort(-p, kind="stable")
    before = np.cumsum(p[order]) - p[order]
    p[order[before >= params.top_p * p.sum()]] = 0
    p[p < params.min_p * p.max()] = 0
    return p


def log_softmax(logits: Array32) -> NDArray[np.float64]:
    x = logits.astype(np.float64) - float(logits.max())
    return x - np.log(np.exp(x).sum())


def retract_every(engine: Engine, steps: int, seed: int = 0) -> None:
    """Right before every so many steps are planned, retract some request that decodes.

    Nobody is retracted again before a token of it was committed: it would get nowhere.
    """
    runtime = engine._runtime
    assert runtime is not None
    state, plan, chance = runtime._state, runtime._scheduler.plan, random.Random(seed)
    had: WeakKeyDictionary[Request, int] = WeakKeyDictionary()

    def planned() -> Any:
        state.running.refresh()
        running = [r for r in state.running.requests if len(r.output) > had.get(r, 0)]
        if state.step % steps == steps - 1 and running:
            victim = chance.choice(running)
            had[victim] = len(victim.output)
            state.retract(victim)
        return plan()

    runtime._scheduler.plan = planned  # type: ignore[method-assign]
