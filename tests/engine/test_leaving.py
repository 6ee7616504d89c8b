"""A reader leaves: by ``break``, by an exception, by being cancelled, by never having read."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import Any

import pytest
from engines import (
    DEPTHS,
    PAGE_SIZES,
    WatchedModel,
    assert_baseline,
    greedy,
    launches,
    prompt,
    settle,
    small_engine,
    tokens_of,
    turns,
)

from aiosched import Engine
from aiosched.device.sim import SimDevice
from aiosched.scheduler.requests import Request
from aiosched.testing.hash_model import oracle


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("depth", DEPTHS)
def test_leaving_the_loop_launches_nothing_more_for_the_request(run, depth, page_size):
    """C29"""
    device, model = SimDevice(), WatchedModel()

    async def main():
        async with small_engine(model, device, overlap_depth=depth, page_size=page_size) as engine:
            count = 0
            async for _ in engine.generate(prompt(1, 8), greedy(50)):
                count += 1
                if count == 2:
                    break
            launched = launches(device)
            await settle(engine)
            assert launches(device) == launched
            assert len(launched) <= 2 + depth + 1
            assert engine.stats().finished == {"abort": 1}
            assert_baseline(engine)

    run(main())


def test_streams_that_are_dropped_unread_cost_nothing(run):
    """C30"""
    device = SimDevice()

    async def main():
        async with small_engine(
            device=device, max_queued_requests=4, max_running_requests=2
        ) as engine:
            for i in range(1_000):
                engine.generate(prompt(i, 8), greedy(50))
            await settle(engine)
            assert launches(device) == []
            assert engine.stats().finished == {"abort": 1_000}
            assert_baseline(engine)
            answer = await engine.complete(prompt(1, 8), greedy(3))
            assert list(answer.token_ids) == oracle(prompt(1, 8), 3)

    run(main())


def test_nothing_remembers_requests_that_were_cancelled(vrun, monkeypatch):
    """C30: of 10,000, cancelled while they wait, run or are paused."""
    alive: weakref.WeakSet[Request] = weakref.WeakSet()
    made = Request.__init__

    def noted(request: Request, *args: Any, **options: Any) -> None:
        made(request, *args, **options)
        alive.add(request)

    monkeypatch.setattr(Request, "__init__", noted)
    prompts, params = [prompt(i, 3) for i in range(50)], greedy(3)

    async def main():
        async with small_engine(
            max_queued_requests=20_000, max_unread_tokens=2, kv_tokens=4096
        ) as engine:
            for round_ in range(10):
                tasks = [
                    asyncio.ensure_future(
                        tokens_of(
                            engine.generate(
                                prompts[i % 50],
                                params,
                                deadline=1e6 if i % 3 else None,
                                request_id=f"{round_}/{i}",
                            )
                        )
                    )
                    for i in range(1_000)
                ]
                await turns(round_ * 3)
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)
            del tasks, task
            await settle(engine)
            assert_baseline(engine)
            assert_empty(engine)
            gc.collect()
            assert not alive

    vrun(main())


def assert_empty(engine: Engine) -> None:
    """Every map, set and list in which the engine keeps requests is empty."""
    runtime = engine._runtime
    state, inbox = runtime._state, runtime.inbox
    assert not engine._answers and not engine._encoding
    assert not inbox.arrivals and not inbox.aborts and not inbox.resumes
    assert not state.live and not state.paused and not state.parked and not state.retiring
    assert not state.prefilling and not state.running.requests and not state.waiting
    assert state.next_deadline is None and not state._deadlines
    assert not runtime._core._in_flight and not runtime._core._future_map._expected
    assert not any(state.table.owner)
    assert state.table.free == state.table.count


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_thousand_cancelled_consumers_take_one_scheduling_pass(run, depth):
    """C31: and the next request starts in that pass."""
    device, model = SimDevice(), WatchedModel()
    last = prompt(5_000, 9)

    async def main():
        async with small_engine(
            model, device, overlap_depth=depth, max_queued_requests=2_000, max_running_requests=4
        ) as engine:
            device.hold(step=2, label="forward")
            tasks = {
                asyncio.ensure_future(tokens_of(engine.generate(prompt(i, 5), greedy(50))))
                for i in range(1_000)
            }
            await device.reached(2)
            await turns()
            launched = len(launches(device))
            passes = []
            intake = engine._runtime._scheduler.intake

            def counting(now: float) -> None:
                passes.append(len(engine._runtime.inbox.aborts))
                intake(now)

            engine._runtime._scheduler.intake = counting
            stream = engine.generate(last, greedy(3))
            while tasks:
                tasks.pop().cancel()
            await turns(4)
            device.release()
            assert await tokens_of(stream) == oracle(last, 3)
            await settle(engine)
            assert passes[0] == 1_000 and not any(passes[1:])
            assert model.steps[launched].positions.tolist() == list(range(9))
            assert engine.stats().finished == {"abort": 1_000, "length": 1}
            assert_baseline(engine)

    run(main())


@pytest.mark.parametrize("depth", DEPTHS)
def test_an_exception_of_the_loop_body_arrives_unchanged_and_ends_the_request(run, depth):
    """C37"""
    device = SimDevice()

    async def main():
        async with small_engine(device=device, overlap_depth=depth) as engine:
            error = KeyError("mine")

            async def consumer() -> None:
                async for token in engine.generate(prompt(1, 8), greedy(50)):
                    if token.index == 1:
                        raise error

            with pytest.raises(KeyError) as caught:
                await consumer()
            launched = launches(device)
            assert caught.value is error and error.__context__ is None
            await settle(engine)
            assert launches(device) == launched
            assert engine.stats().finished == {"abort": 1}
            assert_baseline(engine)

    run(main())


@pytest.mark.parametrize("leave", ["break", "raise", "abort", "drop", "context"])
def test_leaving_after_the_last_token_changes_neither_reason_nor_counts(run, leave):
    """C37"""

    async def main():
        async with small_engine() as engine:
            stream = engine.generate(prompt(1, 8), greedy(3), request_id="job")
            try:
                async for token in stream:
                    if token.finish_reason is None:
                        continue
                    if leave == "break":
                        break
                    if leave == "raise":
                        raise KeyError
                    if leave == "abort":
                        stream.abort()
                        assert engine.abort("job") is False
                    if leave == "context":
                        async with stream:
                            pass
            except KeyError:
                pass
            assert stream.finish_reason == "length"
            if leave == "drop":
                del stream
            await settle(engine)
            assert engine.stats().finished == {"length": 1}

    run(main())


def test_aclose_ends_a_reader_that_waits_in_another_task(run):
    """C38"""
    device = SimDevice()

    async def main():
        async with small_engine(device=device) as engine:
            device.hold(step=2, label="forward")
            stream = engine.generate(prompt(1, 8), greedy(50))
            reader = asyncio.ensure_future(tokens_of(stream))
            await device.reached(2)
            await turns()
            await stream.aclose()
            await stream.aclose()
            await turns(3)
            assert reader.done() and reader.result() == oracle(prompt(1, 8), 1)
            device.release()
            await settle(engine)
            assert engine.stats().finished == {"abort": 1}
            assert_baseline(engine)

    run(main())


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_wrapper_generator_left_by_break_aborts_as_the_stream_itself(run, depth):
    """C38"""
    device = SimDevice()

    async def words(engine: Engine):
        async for token in engine.generate(prompt(1, 8), greedy(50)):
            yield f"<{token.id}>"

    async def main():
        async with small_engine(device=device, overlap_depth=depth) as engine:
            count = 0
            async for _ in words(engine):
                count += 1
                if count == 2:
                    break
            launched = len(launches(device))
            gc.collect()
            await settle(engine)
            # Its collection is a task of the event loop: that takes a turn or two.
            assert len(launches(device)) <= launched + 2
            assert engine.stats().finished == {"abort": 1}
            assert_baseline(engine)

    run(main())
