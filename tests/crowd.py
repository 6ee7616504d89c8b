"""Serve the traffic of a scenario, and hold each answer against what its reader gets alone."""

from __future__ import annotations

import asyncio
import gc

from engines import assert_baseline, greedy
from kv_audit import Watch, audit, limits_of, state_of
from traffic import EOS, STEP, VOCAB, Ask, Got, Scenario

from aiosched import Engine, KVCacheExhausted, TokenStream
from aiosched.device.sim import SimDevice
from aiosched.request import FinishReason
from aiosched.testing.hash_model import HashModel, oracle

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
