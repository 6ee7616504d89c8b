"""C83, C84: a slow reader pauses its own request alone, and loses nothing."""

from __future__ import annotations

import asyncio

import pytest
from engines import (
    DEPTHS,
    WatchedModel,
    assert_baseline,
    greedy,
    launches,
    prompt,
    settle,
    small_engine,
    tokens_of,
)

from aiosched.device.sim import SimDevice
from aiosched.testing.cancel import count_suspensions
from aiosched.testing.hash_model import oracle

LIMIT = 8
PROMPT = prompt(1, 20)
ANSWER = oracle(PROMPT, 40)


async def paused(engine, **arguments):
    """A stream of 40 tokens whose reader took one and stopped; the scheduler rests."""
    stream = engine.generate(PROMPT, greedy(40), **arguments)
    assert (await anext(stream)).id == ANSWER[0]
    await settle(engine)
    assert engine.stats().paused == 1
    return stream


def unread(stream):
    (request,) = stream._answer.requests
    return len(request.output) - request.read


def pages_held(engine):
    stats = engine.stats()
    return stats.kv_pages_total - stats.kv_pages_free - stats.kv_pages_cached


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_reader_that_stops_pauses_its_request_and_nobody_else(vrun, depth):
    model, device = WatchedModel(), SimDevice()

    async def main():
        async with small_engine(
            model, device, overlap_depth=depth, max_unread_tokens=LIMIT
        ) as engine:
            stream = await paused(engine)
            assert LIMIT <= unread(stream) <= LIMIT + depth
            assert pages_held(engine) >= len(PROMPT) // 16
            rows, steps = set(model.batches[-1]), len(launches(device))

            other = await engine.complete(prompt(2, 9), greedy(30))
            assert list(other.token_ids) == oracle(prompt(2, 9), 30)
            assert not any(rows & set(batch) for batch in model.batches[steps:])
            assert unread(stream) <= LIMIT + depth

            assert [ANSWER[0], *await tokens_of(stream)] == ANSWER
            await settle(engine)
            assert engine.stats().retractions == 0
            assert_baseline(engine)

    vrun(main())


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_reader_that_is_slow_all_the_time_gets_the_oracles_answer(vrun, depth):
    async def main():
        device = SimDevice(forward_time=0.01)
        async with small_engine(device=device, overlap_depth=depth, max_unread_tokens=2) as engine:
            answer = []
            async for token in engine.generate(PROMPT, greedy(40)):
                answer.append(token.id)
                await asyncio.sleep(0.05)
            assert answer == ANSWER

    vrun(main())


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_paused_request_can_be_aborted(vrun, depth):
    async def main():
        async with small_engine(overlap_depth=depth, max_unread_tokens=LIMIT) as engine:
            stream = await paused(engine, request_id="job")
            assert engine.abort("job")
            assert stream.finish_reason == "abort"
            last = [token async for token in stream]
            assert [token.finish_reason for token in last] == ["abort"]
            await settle(engine)
            assert_baseline(engine)

    vrun(main())


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_paused_request_meets_its_deadline(vrun, depth):
    async def main():
        loop = asyncio.get_running_loop()
        async with small_engine(overlap_depth=depth, max_unread_tokens=LIMIT) as engine:
            stream = await paused(engine, deadline=5.0)
            await asyncio.sleep(5.0 - loop.time() + 0.001)
            assert stream.finish_reason == "deadline"
            assert engine.stats().finished == {"deadline": 1}
            await settle(engine)
            assert_baseline(engine)
            tokens = [token async for token in stream]
            assert [token.id for token in tokens] == ANSWER[1 : 1 + len(tokens)]
            assert [token.finish_reason for token in tokens[-2:]] == [None, "deadline"]

    vrun(main())


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("then", ["read", "abort", "deadline"])
def test_a_paused_request_is_the_first_to_give_its_pages(vrun, depth, then):
    """Retracted while paused: invisible if it is read again, and it can end like any other."""

    async def main():
        async with small_engine(
            overlap_depth=depth, max_unread_tokens=LIMIT, kv_tokens=96, prefix_cache=False
        ) as engine:
            stream = await paused(engine, request_id="job", deadline=50.0)
            other = await engine.complete(prompt(2, 40), greedy(48))
            assert list(other.token_ids) == oracle(prompt(2, 40), 48)
            stats = engine.stats()
            assert (stats.retractions, stats.paused, stats.finished) == (1, 1, {"length": 1})
            await settle(engine)
            assert pages_held(engine) == 0
            if then == "read":
                assert [ANSWER[0], *await tokens_of(stream)] == ANSWER
            elif then == "abort":
                assert engine.abort("job")
            else:
                await asyncio.sleep(51)
                assert stream.finish_reason == "deadline"
            await settle(engine)
            assert_baseline(engine)

    vrun(main())


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_reader_that_sleeps_through_20_steps_finds_20_tokens_in_order(vrun, depth):
    """C84: it suspends for the first token and for its own sleep, and not once for the twenty."""

    async def main():
        device = SimDevice(forward_time=0.01)
        async with small_engine(device=device, overlap_depth=depth) as engine:
            stream = engine.generate(PROMPT, greedy(40))

            async def reader():
                tokens = [await anext(stream)]
                await asyncio.sleep(0.205)
                return tokens + [await anext(stream) for _ in range(20)]

            suspensions = await count_suspensions(reader())
            assert suspensions == 2
            assert unread(stream) <= 1
            rest = [token.id async for token in stream]
            assert rest == ANSWER[21:]

    vrun(main())


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("n", [1, 3])
def test_awaiting_the_whole_completion_never_pauses_and_wakes_once_for_each_answer(vrun, depth, n):
    async def main():
        device = SimDevice(forward_time=0.01)
        async with small_engine(
            device=device, overlap_depth=depth, max_unread_tokens=2, prefix_cache=False
        ) as engine:
            stream = engine.generate(PROMPT, greedy(40, n=n))

            async def reader():
                whole = await stream
                assert all(list(choice.token_ids) == ANSWER for choice in whole.choices)

            assert await count_suspensions(reader()) <= n
            assert engine.stats().steps == len(launches(device)) <= 40 + n

    vrun(main())


def test_whoever_awaits_the_whole_after_a_pause_resumes_it(vrun):
    async def main():
        async with small_engine(max_unread_tokens=LIMIT) as engine:
            stream = await paused(engine)
            assert list((await stream).token_ids) == ANSWER

    vrun(main())
