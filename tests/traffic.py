"""Random traffic for an engine, how each of its readers behaves, and what each must get."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from engines import assert_baseline, greedy, prompt
from hypothesis import strategies as st
from kv_audit import Watch, audit, limits_of, state_of

from aiosched import Engine, KVCacheExhausted, SamplingParams, Token, TokenStream
from aiosched.device.sim import SimDevice
from aiosched.request import FinishReason, Logprob
from aiosched.testing.hash_model import HashModel, oracle

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


# Running it ---------------------------------------------------------------------------------------


def make_engine(scenario: Scenario) -> Engine:
    device = SimDevice(
        forward_time=lambda step, _: STEP * (1 + (step * 7 + scenario.seed) % 3) / 2,
        copy_time=lambda step, _: STEP * ((step * 5 + scenario.seed) % 4) / 2,
        stage_time=lambda step, _: STEP * ((step + scenario.seed) % 3) / 4,
        keep_trace=False,
    )
    model = HashModel(VOCAB, eos_token_ids=EOS)
    return Engine(model, device=device, debug=True, **scenario.settings)


async def serve(scenario: Scenario) -> list[Got]:
    """Run a scenario from its first arrival to the baseline after its last request."""
    engine = make_engine(scenario)
    async with engine:
        watch = Watch(engine)
        if scenario.retract_every is not None:
            watch.retract_every(scenario.retract_every, most=12)
        got = await asyncio.gather(*(_customer(engine, ask) for ask in scenario.asks))
        await assert_nothing_left(engine)
    return got


async def assert_nothing_left(engine: Engine) -> None:
    """Once the steps in flight are done, only the scheduler's own task is there, and it sleeps."""
    assert engine._runtime is not None
    core, state = engine._runtime._core, state_of(engine)
    await asyncio.sleep(100 * STEP * (limits_of(engine).depth + 2))
    assert not core._in_flight
    assert not state.live
    audit(state)
    assert_baseline(engine)
    assert state.table.free == state.table.count
    assert not state.retiring and not state.waiting._heap and not state._deadlines
    if engine._answers:
        gc.collect()  # a reader's exception may still refer to its stream
    assert not engine._answers and not engine._encoding
    assert asyncio.all_tasks() == {asyncio.current_task(), engine._task}


async def _customer(engine: Engine, ask: Ask) -> Got:
    await asyncio.sleep(ask.arrival)
    got = Got(ask)
    stream = engine.generate(ask.prompt, ask.params, priority=ask.priority, deadline=ask.deadline)
    loop = asyncio.get_running_loop()
    if ask.behaviour == "drops":
        await asyncio.sleep(ask.amount)
        got.cut = True
        return got
    if ask.behaviour == "aborted":
        loop.call_later(ask.amount, engine.abort, stream.request_id)
    if ask.behaviour == "late":
        await asyncio.sleep(ask.amount)
    reader = loop.create_task(_read(stream, ask, got))
    del stream
    if ask.behaviour == "cancelled":
        loop.call_later(ask.amount, reader.cancel)
    try:
        await reader
    except asyncio.CancelledError:
        got.cut = True
    except KVCacheExhausted as error:
        got.error = error.with_traceback(None)
    return got


async def _read(stream: TokenStream, ask: Ask, got: Got) -> None:
    match ask.behaviour:
        case "waits":
            completion = await stream
            for choice in completion.choices:
                got.tokens[choice.index] = list(choice.token_ids)
                got.reasons[choice.index] = choice.finish_reason
                entries = [(entry.logprob, dict(entry.top)) for entry in choice.logprobs or ()]
                got.logprobs[choice.index] = entries
            got.prompt_logprobs = completion.prompt_logprobs
        case "impatient":
            while True:
                try:
                    got.take(await asyncio.wait_for(anext(stream), ask.amount / 8 + 1e-3))
                except TimeoutError:
                    continue
                except StopAsyncIteration:
                    break
        case _:
            count = 0
            async for token in stream:
                got.take(token)
                count += 1
                if ask.behaviour == "leaves" and count >= ask.amount:
                    got.cut = True
                    break
                if ask.behaviour == "slow":
                    await asyncio.sleep(ask.amount)


# What it must give --------------------------------------------------------------------------------


def check(scenario: Scenario, got: Got, alone: Got) -> None:
    """Hold what a reader saw in the crowd against what it sees when it is alone."""
    ask = got.ask
    page_size = scenario.settings["page_size"]
    capacity = scenario.settings["kv_tokens"] // page_size * page_size
    for choice in range(ask.params.n):
        tokens, reason = got.tokens[choice], got.reasons[choice]
        whole = alone.tokens[choice]
        assert tokens == whole[: len(tokens)]
        assert got.logprobs[choice] == alone.logprobs[choice][: len(tokens)]
        if tokens and got.prompt_logprobs is not None:
            assert got.prompt_logprobs == alone.prompt_logprobs
        if got.cut or got.error is not None:
            continue
        match reason:
            case FinishReason.STOP | FinishReason.LENGTH:
                assert (tokens, reason) == (whole, alone.reasons[choice])
            case FinishReason.DEADLINE:
                assert ask.deadline is not None
            case _:
                assert reason is FinishReason.ABORT
                assert ask.behaviour == "aborted"
    if got.error is not None:
        longest = max(len(tokens) for tokens in got.tokens)
        if ask.behaviour != "waits":  # which gets the error alone
            assert len(ask.prompt) + longest == capacity + 1
        assert len(ask.prompt) + max(map(len, alone.tokens)) > capacity + 1


_ALONE: dict[str, Got] = {}


async def serve_alone(scenario: Scenario) -> list[Got]:
    """What each of the requests gets when it is the only one, in a plain engine."""
    missing = {_key(ask): ask for ask in scenario.asks if _key(ask) not in _ALONE}
    if missing:
        plain = Scenario({"overlap_depth": 0, "prefix_cache": False, "kv_tokens": 1024}, 0, ())
        async with make_engine(plain) as engine:
            for key, ask in missing.items():
                _ALONE[key] = await _customer(engine, Ask(ask.prompt, ask.params, 0.0))
                check_against_oracle(_ALONE[key])
    return [_ALONE[_key(ask)] for ask in scenario.asks]


def check_against_oracle(got: Got) -> None:
    """What the plain greedy ones must be, by the ten lines of Python."""
    prompt, params = got.ask.prompt, got.ask.params
    plain = greedy(
        params.max_tokens,
        n=params.n,
        logprobs=params.logprobs,
        prompt_logprobs=params.prompt_logprobs,
        ignore_eos=params.ignore_eos,
        stop_token_ids=params.stop_token_ids,
        stream_interval=params.stream_interval,
    )
    if params != plain:
        return
    ends = {*params.stop_token_ids, *(() if params.ignore_eos else EOS)}
    answer = oracle(prompt, params.max_tokens or 0, VOCAB, ends.__contains__)
    assert got.tokens == [answer] * params.n


def _key(ask: Ask) -> str:
    return repr((ask.prompt, ask.params))
