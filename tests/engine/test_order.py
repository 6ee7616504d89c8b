"""C85 to C87: a full queue, priorities that age, and deadlines in the queue and in the batch."""

from __future__ import annotations

import asyncio

import pytest
from engines import (
    DEPTHS,
    WatchedModel,
    assert_baseline,
    greedy,
    prompt,
    settle,
    small_engine,
    tokens_of,
)

from aiosched import DeadlineExceeded, QueueFull, Token
from aiosched.device.sim import SimDevice
from aiosched.testing.hash_model import oracle

ONE_AT_A_TIME = {"max_running_requests": 1, "prefix_cache": False}


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_full_queue_refuses_at_once_and_takes_the_next_when_one_leaves(vrun, depth):
    """C85."""
    device = SimDevice()

    async def main():
        async with small_engine(
            device=device, overlap_depth=depth, max_queued_requests=4, **ONE_AT_A_TIME
        ) as engine:
            device.hold(label="forward")
            streams = [engine.generate(prompt(i, 9), greedy(6)) for i in range(5)]
            await device.reached(1)
            with pytest.raises(QueueFull) as caught:
                engine.generate(prompt(9, 9), greedy(6))
            assert (caught.value.waiting, caught.value.limit) == (4, 4)
            assert engine.stats().waiting == 4

            streams.pop(2).abort()
            streams.append(engine.generate(prompt(5, 9), greedy(6)))
            with pytest.raises(QueueFull):
                engine.generate(prompt(9, 9), greedy(6))

            device.release()
            answers = await asyncio.gather(*(tokens_of(stream) for stream in streams))
            assert answers == [oracle(prompt(i, 9), 6) for i in (0, 1, 3, 4, 5)]
            await settle(engine)
            assert_baseline(engine)

    vrun(main())


def test_a_queue_of_none_takes_what_can_run_and_no_more(vrun):
    async def main():
        async with small_engine(max_running_requests=2, max_queued_requests=0) as engine:
            streams = [engine.generate(prompt(i, 9), greedy(3)) for i in range(2)]
            with pytest.raises(QueueFull):
                engine.generate(prompt(2, 9), greedy(3))
            await asyncio.gather(*streams)
            await engine.complete(prompt(2, 9), greedy(3))

    vrun(main())


def test_the_n_answers_of_a_prompt_take_n_places(vrun):
    async def main():
        async with small_engine(max_queued_requests=2, **ONE_AT_A_TIME) as engine:
            running = engine.generate(prompt(1, 9), greedy(3))
            with pytest.raises(QueueFull):
                engine.generate(prompt(0, 9), greedy(3, n=3))
            assert engine.stats().waiting == 1
            await running
            await engine.complete(prompt(0, 9), greedy(3, n=3))

    vrun(main())


async def order_of_ends(engine, device, arguments):
    """Submit one request for each of ``arguments`` while another runs; indices as they end."""
    ended = []

    async def read(index, stream):
        await stream
        ended.append(index)

    device.hold(label="forward")
    first = engine.generate(prompt(99, 9), greedy(2))
    await device.reached(1)
    streams = [
        engine.generate(prompt(i, 9), greedy(2), **given) for i, given in enumerate(arguments)
    ]
    readers = [asyncio.ensure_future(read(i, stream)) for i, stream in enumerate(streams)]
    device.release()
    await asyncio.gather(first, *readers)
    return ended


@pytest.mark.parametrize("depth", DEPTHS)
def test_higher_priority_goes_first_and_equals_go_by_arrival(vrun, depth):
    device = SimDevice()

    async def main():
        async with small_engine(device=device, overlap_depth=depth, **ONE_AT_A_TIME) as engine:
            priorities = [{"priority": p} for p in (0, 5, 0, -1, 5, 3)]
            assert await order_of_ends(engine, device, priorities) == [1, 4, 5, 0, 2, 3]

    vrun(main())


def test_with_the_policy_fifo_requests_go_by_arrival(vrun):
    device = SimDevice()

    async def main():
        async with small_engine(device=device, policy="fifo", **ONE_AT_A_TIME) as engine:
            assert await order_of_ends(engine, device, [{}] * 5) == [0, 1, 2, 3, 4]

    vrun(main())


def test_one_level_of_priority_weighs_as_much_as_its_seconds_of_waiting(vrun):
    async def main():
        device = SimDevice()
        device.hold(label="forward")
        async with small_engine(device=device, priority_aging=10.0, **ONE_AT_A_TIME) as engine:
            running = engine.generate(prompt(99, 9), greedy(2))
            await device.reached(1)
            ended = []

            async def read(name, priority):
                await engine.complete(prompt(priority, 9), greedy(2), priority=priority)
                ended.append(name)

            readers = [asyncio.ensure_future(read("old", 0))]
            await asyncio.sleep(19.9)
            readers.append(asyncio.ensure_future(read("overtakes", 2)))  # worth 20 s
            await asyncio.sleep(0.2)
            readers.append(asyncio.ensure_future(read("too late", 2)))
            await asyncio.sleep(0)
            device.release()
            await asyncio.gather(running, *readers)
            assert ended == ["overtakes", "old", "too late"]

    vrun(main())


@pytest.mark.parametrize("depth", [0, 1])
def test_among_urgent_requests_without_end_one_of_low_priority_starts_in_bounded_time(vrun, depth):
    """C86: ten levels at 0.2 s each, so two seconds; and not before, since they are urgent."""
    device = SimDevice(forward_time=0.01, keep_trace=False)

    async def main():
        loop = asyncio.get_running_loop()
        async with small_engine(
            device=device, overlap_depth=depth, priority_aging=0.2, **ONE_AT_A_TIME
        ) as engine:

            async def urgent(seed):
                while True:
                    await engine.complete(prompt(seed, 5), greedy(4), priority=10)

            flood = [asyncio.ensure_future(urgent(i)) for i in range(3)]
            await asyncio.sleep(0.1)
            since = loop.time()
            assert (await anext(engine.generate(prompt(9, 5), greedy(1)))).index == 0
            assert 1.8 < loop.time() - since < 2.0 + 4 * 4 * 0.011
            for task in flood:
                task.cancel()
            await asyncio.wait(flood)

    vrun(main())


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_deadline_that_passes_in_the_queue_ends_the_request_without_a_row(vrun, depth):
    """C87."""
    model, device = WatchedModel(), SimDevice(forward_time=0.1)

    async def main():
        async with small_engine(model, device, overlap_depth=depth, **ONE_AT_A_TIME) as engine:
            first = asyncio.ensure_future(engine.complete(prompt(0, 9), greedy(30)))
            await asyncio.sleep(0.05)
            late = await engine.complete(prompt(1, 9), greedy(3), deadline=0.5)
            assert (late.finish_reason, late.token_ids) == ("deadline", ())
            assert asyncio.get_running_loop().time() < 0.55 + 0.1001
            with pytest.raises(DeadlineExceeded):
                late.raise_for_finish()
            assert list((await first).token_ids) == oracle(prompt(0, 9), 30)
            assert len({row for batch in model.batches for row in batch}) == 1
            assert sum(map(len, model.batches)) == 30

    vrun(main())


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_deadline_that_passes_while_running_cuts_within_one_step(vrun, depth):
    """C87."""
    device = SimDevice(forward_time=0.1)

    async def main():
        async with small_engine(device=device, overlap_depth=depth) as engine:
            other = asyncio.ensure_future(engine.complete(prompt(1, 9), greedy(20)))
            cut = await engine.complete(prompt(0, 9), greedy(30), deadline=1.05)
            assert asyncio.get_running_loop().time() <= 1.05 + 0.1001
            assert cut.finish_reason == "deadline"
            assert 9 <= len(cut.token_ids) <= 11
            assert list(cut.token_ids) == oracle(prompt(0, 9), len(cut.token_ids))
            assert list((await other).token_ids) == oracle(prompt(1, 9), 20)
            await settle(engine)
            assert_baseline(engine)

    vrun(main())


def test_a_stream_that_is_cut_gets_a_last_event_with_the_reason(vrun):
    async def main():
        device = SimDevice(forward_time=0.1)
        async with small_engine(device=device) as engine:
            tokens = [t async for t in engine.generate(prompt(0, 9), greedy(30), deadline=0.55)]
            assert [t.finish_reason for t in tokens] == [None] * (len(tokens) - 1) + ["deadline"]
            late = [t async for t in engine.generate(prompt(0, 9), greedy(30), deadline=0)]
            assert late == [Token(id=None, text="", index=0, finish_reason="deadline")]

    vrun(main())


def test_a_deadline_of_zero_ends_a_request_before_it_begins(vrun):
    async def main():
        async with small_engine() as engine:
            late = await engine.complete(prompt(0, 9), greedy(3), deadline=0)
            assert (late.finish_reason, late.token_ids) == ("deadline", ())
            assert engine.stats().steps == 0

    vrun(main())


def test_a_deadline_that_was_met_is_forgotten_even_behind_one_that_lives_longer(vrun):
    async def main():
        async with small_engine(max_unread_tokens=2) as engine:
            slow = engine.generate(prompt(0, 9), greedy(30), deadline=1000)
            await anext(slow)
            for i in range(20):
                await engine.complete(prompt(i, 5), greedy(2), deadline=2000)
            deadlines = engine._runtime._state._deadlines
            assert len(deadlines) <= 2
            slow.abort()
            await settle(engine)
            assert not deadlines or not engine._runtime._state._deadlines
            await asyncio.sleep(3000)
            assert engine.stats().finished == {"length": 20, "abort": 1}

    vrun(main())


def test_the_growth_of_those_that_prefill_is_counted_through_every_move(vrun):
    """The count that admission keeps room by is the sum over ``prefilling``, at every step."""

    async def main():
        async with small_engine(prefill_chunk_tokens=16, kv_tokens=128) as engine:
            state = engine._runtime._state
            plan, seen = engine._runtime._scheduler.plan, []

            def checked():
                batch = plan()
                assert state._prefill_growth == sum(r.max_new for r in state.prefilling)
                seen.append(state._prefill_growth)
                return batch

            engine._runtime._scheduler.plan = checked
            streams = [engine.generate(prompt(i, 20), greedy(60)) for i in range(5)]
            streams.pop().abort()
            tasks = [asyncio.ensure_future(tokens_of(stream)) for stream in streams]
            await asyncio.gather(*tasks)
            assert any(seen) and not seen[-1]
            assert engine.stats().retractions

    vrun(main())
