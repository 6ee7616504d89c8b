"""Random traffic for an engine, how each of its readers behaves, and what each must get."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from engines import prompt
from hypothesis import strategies as st

from aiosched import SamplingParams, Token
from aiosched.request import FinishReason, Logprob

VOCAB = 64
EOS = (3, 40)
STEP = 0.01  # seconds of a forward

Behaviour = Literal[
    "reads",  # token by token
    "waits",  # for the whole completion
    "slow",  # sleeps `amount` before each token
    "late",  # reads nothing for `amount`, then all
    "impatient",  # reads with a timeout of `amount`, again and again
    "leaves",  # breaks out of its loop after `amount` tokens
    "aborted",  # by its id, after `amount`
    "cancelled",  # its task, after `amount`
    "drops",  # the stream unread, after `amount`
]


@dataclass(frozen=True)
class Ask:
    """One request. Times are seconds."""

    prompt: tuple[int, ...]
    params: SamplingParams
    arrival: float
    priority: int = 0
    deadline: float | None = None
    behaviour: Behaviour = "reads"
    amount: float = 0.0


@dataclass
class Got:
    """What its reader saw, by choice."""

    ask: Ask
    tokens: list[list[int]] = field(default_factory=list)
    logprobs: list[list[Any]] = field(default_factory=list)
    prompt_logprobs: Sequence[Logprob] | None = None
    reasons: list[FinishReason | None] = field(default_factory=list)
    error: Exception | None = None
    cut: bool = False  # it was not interested in the end

    def __post_init__(self) -> None:
        n = self.ask.params.n
        self.tokens = [[] for _ in range(n)]
        self.logprobs = [[] for _ in range(n)]
        self.reasons = [None] * n

    def take(self, token: Token) -> None:
        choice = token.choice
        assert self.reasons[choice] is None, "an event after the last"
        self.reasons[choice] = token.finish_reason
        if token.id is None:  # an abort drops what was not read
            assert token.finish_reason is not None
            assert token.index >= len(self.tokens[choice])
            return
        assert token.index == len(self.tokens[choice]), "a token was lost or doubled"
        self.tokens[choice].append(token.id)
        if token.logprob is not None:
            self.logprobs[choice].append((token.logprob, dict(token.top_logprobs or {})))
        if token.prompt_logprobs is not None:
            self.prompt_logprobs = token.prompt_logprobs


@dataclass(frozen=True)
class Scenario:
    """Settings of an engine, the times its device takes, and its requests.

    ``retract_every``: so many steps apart somebody is retracted, a dozen times.
    """

    settings: dict[str, Any]
    seed: int
    asks: tuple[Ask, ...]
    retract_every: int | None = None


# What there may be --------------------------------------------------------------------------------

BASES = tuple(tuple(prompt(seed, 40, VOCAB)) for seed in range(3))


@st.composite
def prompts(draw: st.DrawFn) -> tuple[int, ...]:
    """Some share their beginnings, some are equal."""
    base = draw(st.sampled_from(BASES))[: draw(st.integers(0, 40))]
    tail = tuple(draw(st.lists(st.integers(0, VOCAB - 1), max_size=4)))
    return base + tail or (7,)


@st.composite
def sampling_params(draw: st.DrawFn) -> SamplingParams:
    fields: dict[str, Any] = {}
    if draw(st.booleans()):
        fields = draw(
            st.sampled_from(
                [
                    {"temperature": 1.0, "seed": 11, "top_p": 0.9},
                    {"temperature": 2.0, "seed": 5, "top_k": 7, "n": 3},
                    {"repetition_penalty": 1.3},
                    {"frequency_penalty": 0.5, "presence_penalty": 0.25},
                    {"temperature": 0.7, "seed": 3, "frequency_penalty": -0.5, "logprobs": 1},
                    {"logprobs": 3},
                    {"prompt_logprobs": 2},
                    {"prompt_logprobs": 0, "logprobs": 0, "n": 2},
                    {"n": 3},
                    {"stop_token_ids": [5, 6, 7, 8, 9]},
                    {"allowed_token_ids": [1, 2, 30]},
                    {"bad_words": [[1, 2], [9]], "logit_bias": {12: 3.0}},
                ]
            )
        )
    max_tokens = draw(st.integers(1, 24))
    return SamplingParams(
        **{"temperature": 0.0, **fields},
        max_tokens=max_tokens,
        min_tokens=draw(st.sampled_from([0, 0, max_tokens // 2])),
        ignore_eos=draw(st.booleans()),
        stream_interval=draw(st.sampled_from([1, 1, 1, 3, 50])),
    )


SECONDS = st.integers(0, 60).map(lambda n: n * STEP / 2)


@st.composite
def asks(draw: st.DrawFn) -> Ask:
    behaviours: list[Behaviour] = ["reads", "waits", "slow", "late", "impatient"]
    behaviours += ["leaves", "aborted", "cancelled", "drops"]
    behaviour = draw(st.sampled_from(behaviours))
    amount = float(draw(st.integers(0, 8))) if behaviour == "leaves" else draw(SECONDS)
    if behaviour == "slow":
        amount /= 4
    return Ask(
        draw(prompts()),
        draw(sampling_params()),
        arrival=draw(SECONDS),
        priority=draw(st.sampled_from([0, 0, 0, 1, 5])),
        deadline=draw(st.none() | st.none() | SECONDS),
        behaviour=behaviour,
        amount=amount,
    )


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    page_size = draw(st.sampled_from([1, 16, 4]))
    return Scenario(
        settings={
            "overlap_depth": draw(st.integers(0, 3)),
            "page_size": page_size,
            # The longest prompt has 44 tokens and always fits.
            "kv_tokens": draw(st.sampled_from([48, 64, 80, 128, 512])),
            "prefill_chunk_tokens": draw(st.sampled_from([1, 5, 16, 64])),
            "max_batch_tokens": draw(st.sampled_from([None, None, 1, 4, 20])),
            "max_running_requests": draw(st.sampled_from([1, 2, 4, 8])),
            "max_unread_tokens": draw(st.sampled_from([1, 3, 8, 1024])),
            "prefix_cache": draw(st.sampled_from([True, True, False])),
            "disable_consecutive_prefill_overlap": draw(st.booleans()),
        },
        seed=draw(st.integers(0, 99)),
        asks=tuple(draw(st.lists(asks(), min_size=1, max_size=10))),
        retract_every=draw(st.sampled_from([None, None, 1, 2, 3, 7])),
    )
