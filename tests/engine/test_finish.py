"""Answers end where they should, the device runs no row too many, and each end happens once."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch
from engines import (
    DEPTHS,
    PAGE_SIZES,
    WatchedModel,
    assert_baseline,
    before_plan,
    greedy,
    launches,
    prompt,
    prompt_whose_answer_is_new_at,
    settle,
    small_engine,
    tokens_of,
    turns,
    until,
)

from aiosched.device.sim import SimDevice
from aiosched.errors import InvalidModelOutput
from aiosched.scheduler.memory import KVMemory
from aiosched.testing.hash_model import HashModel, oracle


@pytest.mark.invariant(4)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("depth", DEPTHS)
def test_a_known_end_runs_exactly_as_many_rows_as_tokens(vrun, depth, page_size):
    """C15, and invariant 4."""
    model = HashModel()
    prompts = [prompt(i, 5 + i) for i in range(8)]

    async def main():
        async with small_engine(model, overlap_depth=depth, page_size=page_size) as engine:
            answers = await asyncio.gather(
                *(engine.complete(p, greedy(n)) for n, p in enumerate(prompts, 1))
            )
            assert [list(a.token_ids) for a in answers] == [
                oracle(p, n) for n, p in enumerate(prompts, 1)
            ]
            assert all(a.finish_reason == "length" for a in answers)
            await settle(engine)
            assert_baseline(engine)

    vrun(main())
    assert sorted(model.sampled.values()) == list(range(1, 9))


@pytest.mark.parametrize("depth", DEPTHS)
def test_requests_about_to_retire_take_no_place_in_a_batch(vrun, depth):
    """C17"""
    model = WatchedModel()
    prompts = [prompt(i, 4) for i in range(64)]

    async def main():
        async with small_engine(
            model, overlap_depth=depth, max_running_requests=8, page_size=1
        ) as engine:
            answers = await asyncio.gather(*(engine.complete(p, greedy(1)) for p in prompts))
            assert [list(a.token_ids) for a in answers] == [oracle(p, 1) for p in prompts]

    vrun(main())
    assert [len(step.sample_sequence) for step in model.steps] == [8] * 8


@pytest.mark.parametrize("depth", DEPTHS)
def test_an_answer_ends_by_length_at_the_longest_sequence(vrun, depth):
    """C18"""

    async def main():
        async with small_engine(overlap_depth=depth, max_model_len=64) as engine:
            table = engine._runtime._state.table
            counts = [c for c in vars(table).values() if isinstance(c, np.ndarray)]
            prompts = [prompt(i, length) for i, length in enumerate((60, 61, 62))]
            streams = [engine.generate(p, greedy(100)) for p in prompts]
            for stream, p, expected in zip(streams, prompts, (4, 3, 2), strict=True):
                tokens = []
                async for token in stream:
                    tokens.append(token.id)
                    assert all((column >= 0).all() for column in counts)
                    stats = engine.stats()
                    assert min(stats.running, stats.waiting, stats.kv_pages_free) >= 0
                assert tokens == oracle(p, expected)
                assert stream.finish_reason == "length"
            await settle(engine)
            assert_baseline(engine)

    vrun(main())


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("depth", DEPTHS)
def test_a_request_of_one_token_ends_in_its_own_prefill(vrun, depth, page_size):
    """C22"""
    model, device = WatchedModel(), SimDevice()
    prompts = [prompt(i, 6) for i in range(3)]
    brief = prompt(9, 20)

    async def main():
        async with small_engine(model, device, overlap_depth=depth, page_size=page_size) as engine:
            device.hold(step=5 + depth)
            streams = [engine.generate(p, greedy(15)) for p in prompts]
            one = []
            before_plan(engine, {4: lambda: one.append(engine.generate(brief, greedy(1)))})
            answers = asyncio.gather(*map(tokens_of, streams))
            await until(lambda: one)
            assert await tokens_of(one[0]) == oracle(brief, 1)
            assert engine.stats().running == 3
            device.release()
            assert await answers == [oracle(p, 15) for p in prompts]
            await settle(engine)
            assert_baseline(engine)

    vrun(main())
    assert [len(rows) for rows in model.batches] == [3] * 3 + [4] + [3] * 11


@pytest.mark.parametrize("ends_by", ["length", "stop"])
@pytest.mark.parametrize("depth", DEPTHS)
def test_a_newcomer_is_launched_without_the_rows_of_whoever_just_ended(vrun, depth, ends_by):
    """C23"""
    model, device = WatchedModel(), SimDevice()
    a, b = prompt_whose_answer_is_new_at(3), prompt(77, 9)
    params = greedy(4) if ends_by == "length" else greedy(9, stop_token_ids=[oracle(a, 4)[3]])

    async def main():
        async with small_engine(model, device, overlap_depth=depth) as engine:
            async for token in engine.generate(a, params):
                if token.finish_reason is not None:
                    before = len(launches(device))
                    stream = engine.generate(b, greedy(3))
            assert await tokens_of(stream) == oracle(b, 3)
            first = model.steps[before]
            assert first.positions.tolist() == list(range(9))
            await settle(engine)
            assert len(model.steps) == len(launches(device)) == engine.stats().steps
            assert not engine._runtime._core._in_flight
            assert_baseline(engine)

    vrun(main())


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("aborts", ["before", "after", "by id", "twice"])
def test_ends_that_fall_on_one_step_make_one_terminal_event(vrun, monkeypatch, depth, aborts):
    """C24: stop token, max_tokens, abort and deadline at the same instant. Invariant 4."""
    p = prompt_whose_answer_is_new_at(3)
    device = SimDevice(forward_time=1.0)
    released = []
    release = KVMemory.release
    monkeypatch.setattr(
        KVMemory,
        "release",
        lambda memory, request, **options: (
            released.append(request.id),
            release(memory, request, **options),
        )[1],
    )

    async def main():
        loop = asyncio.get_running_loop()
        async with small_engine(device=device, overlap_depth=depth) as engine:
            began = loop.time()
            stop = [oracle(p, 4)[3]]
            if aborts == "before":  # the timer is set before the device sets its own
                loop.call_at(began + 4.0, lambda: engine.abort("it"))
            stream = engine.generate(
                p, greedy(4, stop_token_ids=stop), deadline=4.0, request_id="it"
            )
            if aborts == "after":
                loop.call_at(began + 4.0, stream.abort)
            if aborts == "by id":
                loop.call_at(began + 4.0, engine.abort, "it")
            tokens = []
            async for token in stream:
                tokens.append(token)
                if aborts == "twice" and len(tokens) == 3:
                    loop.call_at(began + 4.0, stream.abort)
                    loop.call_at(began + 4.0, engine.abort, "it")
            assert sum(token.finish_reason is not None for token in tokens) <= 1
            assert [token.id for token in tokens if token.id is not None] in (
                oracle(p, 3),
                oracle(p, 4),
            )
            await asyncio.sleep(5.0)
            assert released == ["it"]
            assert sum(engine.stats().finished.values()) == 1
            assert engine.stats().finished == {str(stream.finish_reason): 1}
            assert engine.abort("it") is False
            assert_baseline(engine)

    vrun(main())


class OverflowModel(HashModel):
    """Chooses an id outside the vocabulary after one token, its logits being one too wide."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.after = after

    def forward(self, inputs: Any, kv: object) -> torch.Tensor:
        logits = super().forward(inputs, kv)
        extra = torch.full((len(logits), 1), -1.0)
        extra[inputs.input_ids[inputs.logits_index] == self.after] = 1e6
        return torch.cat([logits, extra], 1)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("fault", ["nan", "overflow"])
def test_a_faulty_row_fails_its_own_request_and_no_neighbour(vrun, fault, depth, page_size):
    """C25"""
    bad = prompt_whose_answer_is_new_at(0, 1, 2)
    wrong = oracle(bad, 3)[2]
    good = [
        p for p in (prompt(100 + i, 7) for i in range(50)) if wrong not in [p[-1], *oracle(p, 9)]
    ][:3]
    model = HashModel(faulty=wrong) if fault == "nan" else OverflowModel(wrong)

    async def main():
        async with small_engine(model, overlap_depth=depth, page_size=page_size) as engine:
            neighbours = [asyncio.ensure_future(engine.complete(p, greedy(9))) for p in good]
            stream = engine.generate(bad, greedy(9))
            tokens = []
            with pytest.raises(InvalidModelOutput) as caught:
                async for token in stream:
                    tokens.append(token.id)
            assert tokens == oracle(bad, 3)
            error = caught.value
            assert (error.step, error.position) == (4, len(bad) + 3)
            assert "step 4" in str(error) and f"position {len(bad) + 3}" in str(error)
            assert ("token 64" in str(error)) == (fault == "overflow")
            with pytest.raises(InvalidModelOutput):
                await engine.complete(bad, greedy(9))
            for p, neighbour in zip(good, neighbours, strict=True):
                assert list((await neighbour).token_ids) == oracle(p, 9)
            await settle(engine)
            assert_baseline(engine)
            assert engine.health().ok

    vrun(main())


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("depth", DEPTHS)
def test_an_abort_while_the_last_chunk_is_in_flight_shows_no_token(vrun, depth, page_size):
    """C26"""
    device = SimDevice()

    async def main():
        async with small_engine(
            device=device, overlap_depth=depth, page_size=page_size, prefill_chunk_tokens=16
        ) as engine:
            device.hold(step=3, label="forward")
            stream = engine.generate(prompt(1, 40), greedy(8))
            reading = asyncio.ensure_future(tokens_of(stream))
            await device.reached(3)
            await turns()
            stream.abort()
            launched = launches(device)
            device.release()
            assert await reading == []
            await settle(engine)
            assert launches(device) == launched
            assert engine.stats().finished == {"abort": 1}
            assert_baseline(engine)

    vrun(main())
