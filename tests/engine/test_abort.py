"""Aborting: by whoever holds the stream or the id, from anywhere, at any time, once."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
from engines import (
    DEPTHS,
    PAGE_SIZES,
    assert_baseline,
    greedy,
    prompt,
    prompt_whose_answer_is_new_at,
    settle,
    small_engine,
    tokens_of,
    turns,
    until,
)

from aiosched import Engine, TokenStream
from aiosched.device.sim import SimDevice
from aiosched.observe.stats import Status
from aiosched.scheduler.memory import KVMemory
from aiosched.scheduler.requests import Request
from aiosched.testing.hash_model import oracle


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_request_in_no_batch_at_the_moment_can_be_aborted(vrun, depth):
    """C28: a budget of one token, so that requests that decode take turns."""
    device = SimDevice()
    prompts = [prompt(i, 1) for i in range(depth + 2)]

    async def main():
        async with small_engine(
            device=device, overlap_depth=depth, max_batch_tokens=1, max_unread_tokens=2
        ) as engine:
            # A budget of one lets only one request start: each is paused by its reader in turn.
            streams = [engine.generate(p, greedy(12)) for p in prompts]
            await settle(engine)
            assert engine.stats().paused == len(streams)
            device.hold(label="forward")
            received = [[(await anext(stream)).id for _ in range(2 + depth)] for stream in streams]
            await turns()
            state = engine._runtime._state
            batches = list(engine._runtime._core._in_flight)
            assert len(batches) == depth + 1
            resting = [
                request
                for request in state.running.requests
                if state.table.last_step[request.row] < batches[0]
            ]
            assert len(resting) == 1
            index = next(i for i, s in enumerate(streams) if s.request_id == resting[0].id)
            assert engine.abort(resting[0].id)
            assert resting[0].finished
            device.release()
            for i, (stream, p) in enumerate(zip(streams, prompts, strict=True)):
                rest = await tokens_of(stream)
                if i != index:
                    assert received[i] + rest == oracle(p, 12)
            await settle(engine)
            assert engine.stats().finished == {"abort": 1, "length": depth + 1}
            assert_baseline(engine)

    vrun(main())


def test_an_id_aborts_its_own_request_and_no_other(run):
    """C32"""

    async def main():
        async with small_engine() as engine:
            one = engine.generate(prompt(1, 8), greedy(20), request_id="job-1")
            ten = engine.generate(prompt(2, 8), greedy(20), request_id="job-10")
            assert (await anext(one)).id == oracle(prompt(1, 8), 1)[0]
            assert engine.abort("job-1") is True
            assert engine.abort("job-1") is False
            assert engine.abort("job") is False
            assert engine.abort("") is False
            assert await tokens_of(ten) == oracle(prompt(2, 8), 20)
            assert engine.abort("job-10") is False
            assert ten.finish_reason == "length"
            last = [token async for token in one]
            assert [(token.id, token.finish_reason) for token in last] == [(None, "abort")]

    run(main())


@pytest.mark.parametrize("depth", DEPTHS)
def test_an_id_can_be_used_again_while_the_result_of_its_first_request_is_pending(run, depth):
    """C33"""
    device = SimDevice()
    a, b = prompt(1, 8), prompt(2, 8)

    async def main():
        async with small_engine(device=device, overlap_depth=depth) as engine:
            device.hold(step=2, label="forward")
            first = engine.generate(a, greedy(20), request_id="job")
            await device.reached(2)
            await turns()
            assert engine.abort("job") is True
            second = engine.generate(b, greedy(6), request_id="job")
            first.abort()
            device.release()
            first.abort()
            assert await tokens_of(second) == oracle(b, 6)
            assert await tokens_of(first) == []
            assert engine.stats().finished == {"abort": 1, "length": 1}

    run(main())


@pytest.mark.parametrize("depth", DEPTHS)
def test_aborting_twice_in_the_turn_of_the_natural_end_frees_once(run, monkeypatch, depth):
    """C34"""
    device = SimDevice()
    freed = []
    release = KVMemory.release

    def counting(memory: KVMemory, request: Request, **options: Any) -> None:
        freed.append(request)
        release(memory, request, **options)

    monkeypatch.setattr(KVMemory, "release", counting)

    async def main():
        async with small_engine(device=device, overlap_depth=depth) as engine:
            device.hold(step=4, label="copy")
            stream = engine.generate(prompt(1, 8), greedy(4), request_id="job")
            await device.reached(4, "copy")
            device.release()  # the result has landed; its commit comes in this turn
            stream.abort()
            assert engine.abort("job") is False
            stream.abort()
            assert stream.finish_reason is None
            await settle(engine)
            assert len(freed) == 1
            assert sum(engine.stats().finished.values()) == 1
            assert_baseline(engine)

    run(main())


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("depth", DEPTHS)
def test_the_prefix_cache_keeps_only_what_a_finished_step_wrote(run, depth, page_size):
    """C35"""
    device = SimDevice()
    whole = prompt(1, 64)
    cousin = whole[:20] + prompt(2, 30)

    async def main():
        async with small_engine(
            device=device, overlap_depth=depth, page_size=page_size, prefill_chunk_tokens=16
        ) as engine:
            device.hold(step=3, label="forward")
            stream = engine.generate(whole, greedy(8))
            await device.reached(3)
            await turns()
            assert engine.abort(stream.request_id)
            device.release()
            await settle(engine)
            assert_baseline(engine)
            assert engine.stats().kv_pages_cached == 32 // page_size
            again = await engine.complete(whole, greedy(8))
            assert list(again.token_ids) == oracle(whole, 8)
            assert again.usage.cached_tokens == 32
            shared = await engine.complete(cousin, greedy(8))
            assert list(shared.token_ids) == oracle(cousin, 8)
            assert shared.usage.cached_tokens == 20 // page_size * page_size

    run(main())


async def paused_stream(engine: Engine) -> TokenStream:
    """A stream whose request is paused and whose scheduler sleeps: no traffic at all."""
    stream = engine.generate(prompt(1, 8), greedy(50))
    await anext(stream)
    await settle(engine)
    assert engine.stats().paused == 1
    return stream


def in_thread(work: Callable[[], object]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def test_an_abort_from_another_thread_wakes_a_sleeping_engine(run):
    """C36"""

    async def main():
        async with small_engine(max_unread_tokens=2) as engine:
            stream = await paused_stream(engine)
            in_thread(stream.abort)
            await until(lambda: engine.stats().finished == {"abort": 1})
            assert await tokens_of(stream) == []
            await settle(engine)
            assert_baseline(engine)

    run(main())


def test_a_stream_collected_in_another_thread_aborts_its_request(run):
    """C36"""

    async def main():
        async with small_engine(max_unread_tokens=2) as engine:
            cycle: list[object] = [await paused_stream(engine)]
            cycle.append(cycle)
            gc.disable()
            try:
                del cycle
                in_thread(gc.collect)
            finally:
                gc.enable()
            await until(lambda: engine.stats().finished == {"abort": 1})
            await settle(engine)
            assert_baseline(engine)

    run(main())


@pytest.mark.parametrize("close", [True, False])
def test_an_abort_after_the_loop_was_closed_does_nothing(run, close):
    """C36: also from a thread, from a finalizer, and if the engine was never closed."""
    engine = small_engine(max_unread_tokens=2)
    streams = []

    async def main():
        await engine.open()
        streams.extend([await paused_stream(engine) for _ in range(1)])
        streams.extend(engine.generate(prompt(i, 8), greedy(50)) for i in range(3))
        if close:
            await engine.close()
        else:
            engine._task.cancel()
            await asyncio.wait([engine._task])
            engine._runtime._watchdog.rest()

    run(main())
    streams[0].abort()
    in_thread(streams[1].abort)
    streams.pop()
    in_thread(streams.clear)
    gc.collect()
    engine._status = Status.CLOSED  # or it would warn when it is collected


def test_the_first_stop_wins_over_a_later_abort(run):
    """C34"""
    p = prompt_whose_answer_is_new_at(1)
    expected = oracle(p, 2)

    async def main():
        async with small_engine() as engine:
            stream = engine.generate(p, greedy(9, stop_token_ids=[expected[1]]))
            assert await tokens_of(stream) == expected
            stream.abort()
            assert stream.finish_reason == "stop"
            await settle(engine)
            assert engine.stats().finished == {"stop": 1}

    run(main())
