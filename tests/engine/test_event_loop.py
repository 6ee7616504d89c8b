"""C72 to C78, and invariant 10: a good citizen of whichever event loop the program runs."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
import time
from asyncio import events

import pytest
from engines import DEPTHS, assert_baseline, greedy, prompt, settle, small_engine, tokens_of

from aiosched import EngineFailed, WrongEventLoop
from aiosched.device.cpu import CpuDevice
from aiosched.device.sim import SimDevice
from aiosched.testing.hash_model import HashModel, oracle

PROMPT = prompt(1, 9)
ANSWER = oracle(PROMPT, 40)


def test_an_engine_made_outside_any_loop_belongs_to_the_loop_that_opens_it(run):
    """C72."""
    engine = small_engine()

    async def use():
        async with engine:
            assert list((await engine.complete(PROMPT, greedy(8))).token_ids) == ANSWER[:8]

    run(use())


def test_used_from_another_loop_an_engine_says_so_and_goes_on(run):
    """C72: every method, and a stream, name the reason."""

    async def elsewhere(engine, stream):
        for use in (
            lambda: engine.generate(PROMPT),
            engine.stats,
            lambda: engine.abort("job"),
        ):
            with pytest.raises(WrongEventLoop, match="event loop"):
                use()
        for awaitable in (
            engine.complete(PROMPT),
            engine.drain(),
            engine.close(),
            anext(stream),
            stream,
        ):
            with pytest.raises(WrongEventLoop, match="event loop"):
                await awaitable
        assert engine.health().ok

    async def main():
        device = SimDevice()
        async with small_engine(device=device) as engine:
            device.hold(label="forward")
            stream = engine.generate(PROMPT, greedy(8))
            with pytest.raises(WrongEventLoop):
                await asyncio.to_thread(engine.stats)  # a thread without a loop
            await asyncio.to_thread(asyncio.run, elsewhere(engine, stream))
            device.release()
            assert await tokens_of(stream) == ANSWER[:8]
        await asyncio.get_running_loop().shutdown_default_executor()

    run(main())


def test_engines_in_one_loop_after_another_share_a_model(run):
    """C73."""
    model = HashModel()

    async def main():
        async with small_engine(model) as engine:
            return list((await engine.complete(PROMPT, greedy(8))).token_ids)

    assert run(main()) == run(main()) == ANSWER[:8]


def test_two_engines_in_one_loop_share_a_model(vrun):
    model = HashModel()

    async def main():
        async with small_engine(model) as one, small_engine(model) as other:
            answers = await asyncio.gather(
                *(engine.complete(PROMPT, greedy(8)) for engine in (one, other) * 4)
            )
            assert all(list(answer.token_ids) == ANSWER[:8] for answer in answers)

    vrun(main())


@pytest.mark.parametrize("depth", DEPTHS)
def test_500_generates_at_once_all_end(vrun, depth):
    """C73."""
    prompts = [prompt(i, 3 + i % 5) for i in range(50)]
    answers = [oracle(ids, 4) for ids in prompts]

    async def main():
        async with small_engine(
            overlap_depth=depth, max_running_requests=64, kv_tokens=4096
        ) as engine:
            whole = await asyncio.gather(
                *(engine.complete(prompts[i % 50], greedy(4)) for i in range(500))
            )
            assert [list(w.token_ids) for w in whole] == [answers[i % 50] for i in range(500)]
            await settle(engine)
            assert_baseline(engine)

    vrun(main())


@pytest.mark.parametrize("device", [SimDevice, CpuDevice])
def test_an_engine_lives_in_a_thread_with_a_loop_of_its_own_and_leaves_none(run, device):
    """C75."""

    async def life():
        async with small_engine(device=device()) as engine:
            return list((await engine.complete(PROMPT, greedy(8))).token_ids)

    before, answers = set(threading.enumerate()), []
    thread = threading.Thread(target=lambda: answers.append(run(life())))
    thread.start()
    thread.join()
    assert answers == [ANSWER[:8]]
    assert set(threading.enumerate()) == before


@pytest.mark.invariant(10)
@pytest.mark.parametrize("depth", [0, 1])
def test_under_load_the_loop_stays_free_and_health_answers(depth):
    """C76: steps of 50 ms and 32 streams, in real time; a probe every millisecond."""

    async def main():
        loop = asyncio.get_running_loop()
        device = SimDevice(forward_time=0.05, realtime=True, check=False)
        async with small_engine(
            device=device, overlap_depth=depth, max_running_requests=32, kv_tokens=4096, debug=False
        ) as engine:
            warm = await engine.complete(PROMPT, greedy(2))
            assert list(warm.token_ids) == ANSWER[:2]
            streams = [engine.generate(prompt(i, 9), greedy(8)) for i in range(32)]
            reading = asyncio.gather(*(tokens_of(stream) for stream in streams))
            lags = []
            while not reading.done():
                due = loop.time() + 0.001
                await asyncio.sleep(0.001)
                lags.append(loop.time() - due)
                assert engine.health().ok
            assert await reading == [oracle(prompt(i, 9), 8) for i in range(32)]
            lags.sort()
            assert len(lags) > 50
            # The machine of the tests may be busy: it is forgiven one late wake-up in a hundred.
            assert lags[-1 - len(lags) // 100] < 0.020

    asyncio.run(main())


class SameToken(HashModel):
    """Always says token 1, without arithmetic: what is measured is the engine's host work."""

    def forward(self, inputs, kv):
        import torch

        logits = torch.zeros(len(inputs.logits_index), self.vocab_size)
        logits[:, 1] = 1.0
        return logits


def test_2000_results_in_one_step_hold_the_loop_for_less_than_10_ms(monkeypatch):
    """C76, in CPU time of the loop's own thread, and in the median of steps: other programs that
    run on the machine do not count."""
    longest = [0.0]
    run_callback = events.Handle._run

    def timed(handle):
        since = time.thread_time()
        run_callback(handle)
        longest[-1] = max(longest[-1], time.thread_time() - since)

    async def main():
        device = CpuDevice(threads=1)
        async with small_engine(
            SameToken(),
            device,
            max_running_requests=2001,
            kv_tokens=2001 * 32,
            prefill_chunk_tokens=8192,
            debug=False,
        ) as engine:
            streams = [engine.generate([5, 6], greedy(12)) for _ in range(2000)]
            reading = asyncio.gather(*(tokens_of(stream) for stream in streams))
            await anext(watched := engine.generate([5, 6], greedy(12)))  # all decode by now
            gc.collect()
            gc.disable()  # a collection is the program's, and is not what is measured here
            monkeypatch.setattr(events.Handle, "_run", timed)
            for _ in range(9):
                await anext(watched)
                longest.append(0.0)
            monkeypatch.undo()
            assert await reading == [[1] * 12] * 2000

    try:
        asyncio.run(main())
    finally:
        gc.enable()
    assert sorted(longest[:9])[4] < 0.010


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_collection_after_every_callback_loses_no_task_and_no_future(vrun, monkeypatch, depth):
    """C77. What was there before is frozen, so that a collection looks at the engine alone."""
    run_callback = events.Handle._run

    def run_and_collect(handle):
        run_callback(handle)
        gc.collect()

    async def main():
        device = SimDevice(forward_time=0.01)
        async with small_engine(device=device, overlap_depth=depth) as engine:
            streams = [engine.generate(prompt(i, 9), greedy(6)) for i in range(4)]
            dropped = engine.generate(prompt(9, 9), greedy(50))
            await anext(dropped)
            del dropped
            answers = await asyncio.gather(*(tokens_of(stream) for stream in streams))
            assert answers == [oracle(prompt(i, 9), 6) for i in range(4)]
            await settle(engine)
            assert_baseline(engine)

    gc.collect()
    gc.freeze()
    monkeypatch.setattr(events.Handle, "_run", run_and_collect)
    try:
        vrun(main())
    finally:
        gc.unfreeze()


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("label", ["forward", "copy"])
def test_a_step_that_fails_ends_the_engine_and_everybody_is_told_why(vrun, caplog, depth, label):
    """C78."""

    async def main():
        device = SimDevice()
        cause = ZeroDivisionError("in step 5")
        device.failing(5, label, cause)
        engine = small_engine(device=device, overlap_depth=depth, max_running_requests=2)
        await engine.open()
        streams = [engine.generate(prompt(i, 9), greedy(30)) for i in range(4)]
        outcomes = await asyncio.gather(*map(tokens_of, streams), return_exceptions=True)
        for outcome in outcomes:
            assert type(outcome) is EngineFailed
            assert outcome.__cause__ is cause
        assert len({id(outcome) for outcome in outcomes}) == 4
        assert engine.health().status == "failed"
        assert "in step 5" in engine.health().reason
        with pytest.raises(EngineFailed) as caught:
            engine.generate(PROMPT)
        assert caught.value.__cause__ is cause
        with pytest.raises(EngineFailed):
            await engine.complete(PROMPT)
        await engine.close()

    vrun(main())
    errors = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert [record.message for record in errors] == ["engine failed"]


@pytest.mark.parametrize("depth", DEPTHS)
def test_2000_streams_cancelled_at_once_leave_the_next_request_served(vrun, depth):
    async def main():
        device = SimDevice(forward_time=0.01)
        async with small_engine(device=device, overlap_depth=depth) as engine:
            tasks = [
                asyncio.ensure_future(engine.complete(PROMPT, greedy(50))) for _ in range(2000)
            ]
            await asyncio.sleep(0.055)
            assert engine.stats().running == 8
            for task in tasks:
                task.cancel()
            steps = engine.stats().steps
            answer = await engine.complete(prompt(2, 9), greedy(4))
            assert list(answer.token_ids) == oracle(prompt(2, 9), 4)
            assert engine.stats().steps <= steps + depth + 1 + 4
            assert all(task.cancelled() for task in tasks)
            await settle(engine)
            assert engine.stats().finished == {"abort": 2000, "length": 1}
            assert not engine._runtime._state.live
            assert_baseline(engine)

    vrun(main())
