"""A consumer may be cancelled wherever it waits, and nobody else notices. Invariant 5."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from engines import (
    DEPTHS,
    assert_baseline,
    before_plan,
    greedy,
    prompt,
    settle,
    small_engine,
    tokens_of,
    turns,
    until,
)

from aiosched import Engine
from aiosched.device.sim import SimDevice
from aiosched.testing.cancel import cancel_at, count_suspensions
from aiosched.testing.hash_model import oracle

VICTIM = prompt(1, 40)  # three chunks of at most 16
ANSWER = oracle(VICTIM, 4)
BYSTANDERS = [prompt(2, 5), prompt(3, 7)]

Consumer = Callable[[Engine], Awaitable[Any]]


# Plain loops: the frame of a comprehension, kept by the traceback, would hold the stream.
async def iterates(engine: Engine) -> list[int | None]:
    received = []
    async for token in engine.generate(VICTIM, greedy(4)):
        received.append(token.id)
    return received


async def iterates_in_a_context(engine: Engine) -> list[int | None]:
    async with engine.generate(VICTIM, greedy(4)) as stream:
        return [token.id async for token in stream]


async def awaits_the_whole(engine: Engine) -> list[int]:
    return list((await engine.complete(VICTIM, greedy(4))).token_ids)


async def reads_with_a_timeout(engine: Engine) -> list[int | None]:
    async with engine.generate(VICTIM, greedy(4)) as stream:
        received = []
        for _ in range(4):
            async with asyncio.timeout(100):
                received.append((await anext(stream)).id)
        return received


async def reads_through_a_generator(engine: Engine) -> list[int | None]:
    async def wrapped():
        async for token in engine.generate(VICTIM, greedy(4)):
            yield token

    received = []
    async for token in wrapped():
        received.append(token.id)
    return received


CONSUMERS = [
    iterates,
    iterates_in_a_context,
    awaits_the_whole,
    reads_with_a_timeout,
    reads_through_a_generator,
]


def timers() -> list[asyncio.TimerHandle]:
    loop: Any = asyncio.get_running_loop()
    return [timer for timer in loop._scheduled if not timer.cancelled()]


async def assert_nobody_noticed(engine: Engine, bystanders: list[asyncio.Task[list[int]]]) -> None:
    """Baseline, the scheduler lives, no timer is left, and the bystanders got their tokens."""
    assert await asyncio.gather(*bystanders) == [oracle(p, 14) for p in BYSTANDERS]
    await settle(engine)
    assert_baseline(engine)
    assert not engine._runtime._state.live
    assert engine._runtime._state.table.free == engine._runtime.limits.rows
    assert not engine._task.done() and engine.health().ok
    assert not timers()


def bystanders_of(engine: Engine) -> list[asyncio.Task[list[int]]]:
    return [asyncio.ensure_future(tokens_of(engine.generate(p, greedy(14)))) for p in BYSTANDERS]


@pytest.mark.invariant(5)
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("consumer", CONSUMERS)
@pytest.mark.parametrize("depth", DEPTHS)
def test_a_consumer_can_be_cancelled_at_each_of_its_suspensions(vrun, depth, consumer, late):
    """C27: every await point. ``late``: the token has arrived and is not taken yet."""
    device = SimDevice(forward_time=0.010)

    async def main():
        async with small_engine(
            device=device, overlap_depth=depth, prefill_chunk_tokens=16
        ) as engine:
            expected = await count_suspensions(consumer(engine))
            assert expected >= (1 if consumer is awaits_the_whole else 4)
            for n in itertools.count(1):
                bystanders = bystanders_of(engine)
                outcome = await cancel_at(consumer(engine), n, late=late)
                assert outcome.cancelled == outcome.reached
                if not outcome.reached:
                    assert outcome.value == ANSWER
                await assert_nobody_noticed(engine, bystanders)
                if not outcome.reached:
                    break
            assert n == expected + 1

    vrun(main())


# The victim is submitted for step 2; its chunks are steps 2 to 4, its tokens come of 4 to 7.
# State → the step at whose gate it is cancelled, and how many tokens it has read by then.
STATES = {
    "first chunk": (2, 0),
    "between chunks": (3, 0),
    "last chunk": (4, 0),
    "decode": (5, 1),
    "last token": (7, 3),
}


@pytest.mark.parametrize("label", ["stage", "forward", "copy"])
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("depth", DEPTHS)
def test_a_consumer_can_be_cancelled_in_each_state_of_its_request(vrun, depth, state, label):
    """C27: while a step of its own is behind a gate, in every stage of that step."""
    step, read = STATES[state]
    device = SimDevice()
    received: list[int | None] = []

    async def main():
        streams = []

        async def consume() -> None:
            async for token in streams.pop():
                received.append(token.id)

        async with small_engine(
            device=device, overlap_depth=depth, prefill_chunk_tokens=16
        ) as engine:
            device.hold(step=step, label=label)
            before_plan(engine, {2: lambda: streams.append(engine.generate(VICTIM, greedy(4)))})
            bystanders = bystanders_of(engine)
            await until(lambda: streams)
            task = asyncio.ensure_future(consume())
            await device.reached(step, label)
            await turns()
            assert received == ANSWER[:read]
            task.cancel()
            await turns(3)
            assert task.cancelled()
            device.release()
            await assert_nobody_noticed(engine, bystanders)
            assert received == ANSWER[:read]
            # The result of its last step is committed before the abort is seen.
            ends = {"length": 3} if state == "last token" else {"abort": 1, "length": 2}
            assert engine.stats().finished == ends

    vrun(main())


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_consumer_can_be_cancelled_while_its_request_waits_in_the_queue(vrun, depth):
    """C27"""
    device = SimDevice()

    async def main():
        async with small_engine(
            device=device, overlap_depth=depth, max_running_requests=2
        ) as engine:
            device.hold(step=3, label="forward")
            bystanders = bystanders_of(engine)
            await turns(2)
            task = asyncio.ensure_future(iterates(engine))
            await device.reached(3)
            await turns()
            assert engine.stats().waiting == 1
            task.cancel()
            await turns(3)
            assert task.cancelled()
            device.release()
            await assert_nobody_noticed(engine, bystanders)
            assert engine.stats().tokens == 2 * 14

    vrun(main())


@pytest.mark.parametrize("when", ["finished", "never read"])
@pytest.mark.parametrize("depth", DEPTHS)
def test_a_consumer_that_reads_no_more_or_not_yet_can_be_cancelled(vrun, depth, when):
    """C27"""

    async def main():
        async def consume() -> None:
            stream = engine.generate(VICTIM, greedy(4 if when == "finished" else 40))
            if when == "finished":
                async for _ in stream:
                    pass
            await asyncio.get_running_loop().create_future()

        async with small_engine(overlap_depth=depth, max_unread_tokens=2) as engine:
            bystanders = bystanders_of(engine)
            task = asyncio.ensure_future(consume())
            await turns(200)
            task.cancel()
            await turns(3)
            assert task.cancelled()
            del task  # with it the traceback that holds the stream
            await assert_nobody_noticed(engine, bystanders)
            ends = {"length": 3} if when == "finished" else {"abort": 1, "length": 2}
            assert engine.stats().finished == ends

    vrun(main())


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_cancelled_task_that_somebody_keeps_loses_its_request_after_the_grace(vrun, depth):
    """C27: its traceback holds the stream, and no reader comes back."""

    async def main():
        async def consume() -> None:
            stream = engine.generate(VICTIM, greedy(400))
            async for _ in stream:
                pass

        async with small_engine(
            device=SimDevice(forward_time=0.010), overlap_depth=depth, reader_grace=1.0
        ) as engine:
            bystanders = bystanders_of(engine)
            task = asyncio.ensure_future(consume())
            await asyncio.sleep(0.200)
            task.cancel()
            await asyncio.sleep(0.999)
            assert engine.stats().running == 1
            await asyncio.sleep(0.020)
            assert task.cancelled()
            await assert_nobody_noticed(engine, bystanders)
            assert engine.stats().finished == {"abort": 1, "length": 2}

    vrun(main())


async def cleans_up_by_sleeping(engine: Engine) -> None:
    async with engine.generate(VICTIM, greedy(400)) as stream:
        try:
            async for _ in stream:
                pass
        finally:
            await asyncio.sleep(1)
            await asyncio.sleep(1)


async def cleans_up_by_closing(engine: Engine) -> None:
    stream = engine.generate(VICTIM, greedy(400))
    try:
        async for _ in stream:
            pass
    finally:
        await stream.aclose()
        await asyncio.sleep(1)


async def cleans_up_by_reading_on(engine: Engine) -> None:
    async with engine.generate(VICTIM, greedy(400)) as stream:
        try:
            async for _ in stream:
                pass
        finally:
            await anext(stream)


@pytest.mark.parametrize("between", range(4))
@pytest.mark.parametrize(
    "consumer", [cleans_up_by_sleeping, cleans_up_by_closing, cleans_up_by_reading_on]
)
@pytest.mark.parametrize("depth", DEPTHS)
def test_a_cleanup_that_is_cancelled_again_releases_all_the_same(vrun, depth, consumer, between):
    """C39: ``between`` turns of the loop lie between the two cancels."""
    device = SimDevice()

    async def main():
        async with small_engine(device=device, overlap_depth=depth) as engine:
            device.hold(step=4, label="forward")
            bystanders = bystanders_of(engine)
            task = asyncio.ensure_future(consumer(engine))
            await device.reached(4)
            await turns()
            task.cancel()
            await turns(between)
            task.cancel()
            await turns(3)
            if not task.done():  # two cancels before its first turn count as one
                task.cancel()
                await turns(3)
            assert task.cancelled()
            device.release()
            await assert_nobody_noticed(engine, bystanders)
            assert engine.stats().finished == {"abort": 1, "length": 2}

    vrun(main())
