"""Retraction: a request loses its KV to others, is read in again, and its reader sees nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from engines import (
    WatchedModel,
    assert_baseline,
    before_plan,
    greedy,
    prompt,
    settle,
    slow_device,
    small_engine,
    tokens_of,
    turns,
)
from kv_audit import Watch, audit, holders, state_of
from sampling_reference import ByteTokenizer

from aiosched import Engine, SamplingParams, Token
from aiosched.device.sim import SimDevice
from aiosched.scheduler.requests import Request, State
from aiosched.testing.hash_model import HashModel, oracle

VirtualRun = Callable[[Coroutine[Any, Any, Any]], Any]
OVERLAPPED = (1, 2, 3)


def only_request(engine: Engine) -> Request:
    (request,) = state_of(engine).live
    return request


def retract(engine: Engine) -> None:
    """Retract the one request, which has a step in flight."""
    request, state = only_request(engine), state_of(engine)
    assert state.table.last_step[request.row] > state.completed
    state.retract(request)


@pytest.mark.parametrize("depth", OVERLAPPED)
@pytest.mark.parametrize("page_size", [1, 16])
def test_streams_do_not_show_that_somebody_is_retracted_every_three_steps(
    vrun: VirtualRun, page_size: int, depth: int
) -> None:  # C50
    async def main() -> None:
        engine = small_engine(
            None, slow_device(), page_size=page_size, overlap_depth=depth, prefill_chunk_tokens=24
        )
        async with engine:
            Watch(engine).retract_every(3, most=40)
            prompts = [prompt(i, 10 + 3 * i) for i in range(8)]
            streams = [engine.generate(ids, greedy(40)) for ids in prompts]
            got = await asyncio.gather(*(_events(stream) for stream in streams))
            for ids, events in zip(prompts, got, strict=True):
                assert [token.id for token in events] == oracle(ids, 40)
                assert [token.index for token in events] == list(range(40))
            assert engine.stats().retractions >= 15
            await settle(engine)
            assert_baseline(engine)

    vrun(main())


@pytest.mark.parametrize("depth", OVERLAPPED)
def test_a_late_token_is_dropped_when_its_request_was_admitted_again(
    vrun: VirtualRun, depth: int
) -> None:  # C51
    async def main() -> None:
        device, ids = SimDevice(), prompt(1, 20)
        device.hold(step=3, label="forward")
        async with small_engine(None, device, overlap_depth=depth) as engine:
            Watch(engine)
            before_plan(engine, {4: lambda: retract(engine)})
            reader = asyncio.ensure_future(tokens_of(engine.generate(ids, greedy(8))))
            await device.reached(3)
            await turns()
            request = only_request(engine)
            assert request.retractions == 1
            assert request.state is State.DECODE  # its prefill is launched, behind the gate
            assert len(request.output) == 3 - depth
            device.release()
            assert await reader == oracle(ids, 8)
            await settle(engine)
            assert_baseline(engine)

    vrun(main())


@pytest.mark.parametrize("depth", OVERLAPPED)
def test_one_request_may_be_retracted_again_and_again(vrun: VirtualRun, depth: int) -> None:  # C51
    async def main() -> None:
        ids = prompt(1, 20)
        async with small_engine(None, slow_device(), overlap_depth=depth) as engine:
            Watch(engine)
            before_plan(engine, {step: lambda: retract(engine) for step in (4, 5, 6)})
            events = await _events(engine.generate(ids, greedy(8)))
            assert [token.id for token in events] == oracle(ids, 8)
            assert engine.stats().retractions == 3

    vrun(main())


@pytest.mark.invariant(6)
@pytest.mark.parametrize("depth", OVERLAPPED)
def test_a_result_applies_only_in_the_epoch_that_it_was_computed_in(
    vrun: VirtualRun, depth: int
) -> None:  # invariant 6
    """Whatever a step computed for an earlier stay in a row changes nothing when it lands."""

    async def main() -> None:
        async with small_engine(None, slow_device(), overlap_depth=depth) as engine:
            Watch(engine).retract_every(2, most=30)
            core, state = engine._runtime._core, state_of(engine)
            apply, late = core._results.process_batch_result, 0

            def applied(batch: Any, result: Any) -> None:
                nonlocal late
                rows, generations = batch.sampled.rows, batch.sampled.generations
                current = state.table.current(rows, generations)
                before = [len(request.output) for request in batch.sampled.requests]
                apply(batch, result)
                grown = [
                    len(request.output) - length
                    for request, length in zip(batch.sampled.requests, before, strict=True)
                ]
                assert grown == current.astype(int).tolist()
                late += int((~current).sum())

            core._results.process_batch_result = applied
            prompts = [prompt(i, 5 + 7 * i) for i in range(6)]
            streams = [engine.generate(ids, greedy(16)) for ids in prompts]
            got = await asyncio.gather(*(tokens_of(stream) for stream in streams))
            assert got == [oracle(ids, 16) for ids in prompts]
            assert late >= 5

    vrun(main())


@pytest.mark.parametrize("depth", OVERLAPPED)
def test_the_first_token_comes_once_if_its_step_was_in_flight_at_the_retraction(
    vrun: VirtualRun, depth: int
) -> None:  # C53
    async def main() -> None:
        ids = prompt(1, 40)
        engine = small_engine(None, slow_device(), overlap_depth=depth, prefill_chunk_tokens=16)
        async with engine:
            Watch(engine)

            def retract_unseen() -> None:
                assert not only_request(engine).output
                retract(engine)

            before_plan(engine, {4: retract_unseen})
            events = await _events(engine.generate(ids, greedy(4)))
            assert [(t.index, t.id) for t in events] == list(enumerate(oracle(ids, 4)))
            assert engine.stats().retractions == 1

    vrun(main())


BYTES = [*"é世👨".encode()]
"""Bytes of three characters, of which an answer is made at random: few are complete."""


@pytest.mark.parametrize("depth", OVERLAPPED)
def test_text_and_logprobs_are_those_of_a_run_without_retraction(
    vrun: VirtualRun, depth: int
) -> None:  # C55
    tokenizer = ByteTokenizer([bytes([BYTES[i % len(BYTES)]]) for i in range(64)])
    ids = next(
        ids
        for ids in (prompt(seed, 12) for seed in range(1000))
        if tokenizer.decode(oracle(ids, 5)).endswith("\ufffd")
        and not tokenizer.decode(oracle(ids, 6)).endswith("\ufffd")
    )

    async def run(retracted: bool) -> list[Token]:
        model = HashModel()
        model.tokenizer = tokenizer
        async with small_engine(model, slow_device(), overlap_depth=depth) as engine:
            Watch(engine)
            if retracted:
                step = 6 + depth  # five tokens are committed when this step is planned
                before_plan(engine, {step: lambda: retract_after(engine, 5)})
            return await _events(engine.generate(ids, greedy(12, logprobs=3)))

    def retract_after(engine: Engine, tokens: int) -> None:
        assert len(only_request(engine).output) == tokens
        retract(engine)

    plain, retracted = vrun(run(False)), vrun(run(True))
    assert "".join(token.text for token in retracted) == tokenizer.decode(oracle(ids, 12))
    assert retracted == plain  # ids, text, log-probabilities and alternatives
    assert all(len(token.top_logprobs or ()) == 3 for token in retracted)


@pytest.mark.parametrize("depth", OVERLAPPED)
def test_penalties_count_prompt_and_answer_after_a_retraction(
    vrun: VirtualRun, depth: int
) -> None:  # C56
    ids = prompt(1, 12, vocab_size=16)
    params = SamplingParams(
        temperature=0.0, max_tokens=24, repetition_penalty=1.2, frequency_penalty=0.4
    )

    async def run(*steps: int) -> list[int]:
        model = HashModel(vocab_size=16)
        async with small_engine(model, slow_device(), overlap_depth=depth) as engine:
            Watch(engine)
            before_plan(engine, {step: lambda: retract(engine) for step in steps})
            got = await tokens_of(engine.generate(ids, params))
            assert engine.stats().retractions == len(steps)
            return got

    plain = vrun(run())
    assert plain != oracle(ids, 24, vocab_size=16)
    assert vrun(run(4, 9, 10, 20)) == plain


@pytest.mark.parametrize("depth", OVERLAPPED)
def test_an_abort_ends_one_that_waits_after_a_retraction(
    vrun: VirtualRun, depth: int
) -> None:  # C57
    async def main() -> None:
        ids, model = prompt(1, 20), WatchedModel()
        async with small_engine(model, slow_device(), overlap_depth=depth) as engine:
            Watch(engine)
            stream = engine.generate(ids, greedy(20), request_id="job")

            def retract_and_abort() -> None:
                request = only_request(engine)
                retract(engine)
                assert request.state is State.QUEUED
                assert not holders(state_of(engine))
                assert engine.abort("job")

            before_plan(engine, {5: retract_and_abort})
            got = [token async for token in stream]
            assert got[-1].finish_reason == "abort"
            await settle(engine)
            assert len(model.steps) == 4
            audit(state_of(engine))
            assert_baseline(engine)

    vrun(main())


async def _events(stream: Any) -> list[Token]:
    return [token async for token in stream]
