"""A row belongs to one request from admission to release, and is reused behind its last step."""

from __future__ import annotations

import asyncio
import random
from collections import Counter, deque

import numpy as np
import pytest
from engines import (
    DEPTHS,
    WatchedModel,
    assert_baseline,
    before_plan,
    greedy,
    launches,
    prompt,
    settle,
    small_engine,
    tokens_of,
    turns,
)

from aiosched.device.sim import SimDevice
from aiosched.model.inputs import StepResult
from aiosched.request import FinishReason
from aiosched.scheduler.inbox import Inbox
from aiosched.scheduler.reader import Reader
from aiosched.scheduler.requests import Family, Request
from aiosched.scheduler.results import ResultProcessor
from aiosched.scheduler.scheduler import Limits, Scheduler
from aiosched.scheduler.state import HOLDS_ROW
from aiosched.testing.hash_model import oracle


def test_rows_belong_to_one_request_and_change_generation_with_their_owner():
    """C03"""
    draw = random.Random(3)
    limits = Limits(
        num_pages=40,
        page_size=4,
        max_model_len=64,
        max_running=4,
        chunk_tokens=8,
        batch_tokens=12,
        depth=0,
        check=True,
    )
    assert limits.rows == 8
    loop = asyncio.new_event_loop()
    scheduler = Scheduler(limits, Inbox(loop), eos_token_ids=(0,))
    state, table = scheduler.state, scheduler.state.table
    results = ResultProcessor(state, vocab_size=64, eos_token_ids=(0,))
    in_flight: deque = deque()
    generations: Counter[int] = Counter()
    stays: dict[tuple[int, int], tuple[Request, int]] = {}

    def arrive(serial: int) -> None:
        params = greedy(draw.randint(1, 20))
        state.push(
            Request(
                f"r{serial}",
                np.array(prompt(serial, draw.randint(1, 30)), dtype=np.int32),
                params,
                max_new=params.max_tokens,
                seed=0,
                stop_ids=frozenset({0}),
                reader=Reader(),
                family=Family(),
                key=(0.0, serial),
            )
        )

    def commit() -> None:
        batch = in_flight.popleft()
        tokens = np.array([draw.randrange(64) for _ in batch.sampled.rows], dtype=np.int64)
        results.process_batch_result(batch, StepResult(tokens))

    def check() -> None:
        holders = [r for r in state.live if r.state in HOLDS_ROW]
        rows = [r.row for r in holders]
        assert len(set(rows)) == len(rows) and 0 not in rows
        assert all(table.owner[r.row] is r for r in holders)
        assert table.owner[0] is None
        assert len(rows) + table.free + table.arriving == table.count
        assert all(r.row == 0 for r in state.live if r.state not in HOLDS_ROW)
        for request in holders:
            stay = (request, request.retractions)
            row, generation = request.row, int(table.generation[request.row])
            if stays.setdefault((row, generation), stay) != stay:
                raise AssertionError(f"row {row} has two owners in generation {generation}")
            assert generation >= generations[row]
            generations[row] = generation

    for serial in range(10_000):
        operation = draw.random()
        if operation < 0.3 and len(state.waiting) < 10:
            arrive(serial)
        elif operation < 0.65 and len(in_flight) < 3:
            if (batch := scheduler.plan()) is not None:
                in_flight.append(batch)
        elif operation < 0.9 and in_flight:
            commit()
        elif operation < 0.95 and state.live:
            state.finish(draw.choice(sorted(state.live, key=lambda r: r.key)), FinishReason.ABORT)
        elif victims := [v for v in state.victims() if v not in state.retiring]:
            state.retract(draw.choice(victims))
        check()
    assert len(stays) > 500 and state.retractions > 100
    loop.close()


@pytest.mark.parametrize("rows", [1, 2])
def test_a_row_in_use_by_a_step_in_flight_is_not_written_by_its_next_owner(vrun, monkeypatch, rows):
    """C04: A ends by a stop token in step 3 while step 4 still has its row."""
    monkeypatch.setattr(Limits, "rows", property(lambda limits: rows))
    model, device = WatchedModel(), SimDevice()
    a, b = prompt(1, 6), prompt(2, 6)
    stop = oracle(a, 3)[2]
    assert stop not in oracle(a, 2)

    async def main():
        async with small_engine(model, device, overlap_depth=1, max_running_requests=1) as engine:
            device.hold(step=4)
            first = engine.generate(a, greedy(8, stop_token_ids=[stop]))
            second = engine.generate(b, greedy(4))
            assert await tokens_of(first) == oracle(a, 3)
            await turns()
            assert launches(device) == ([1, 2, 3, 4] if rows == 1 else [1, 2, 3, 4, 5])
            device.release()
            assert await tokens_of(second) == oracle(b, 4)
            await settle(engine)
            assert_baseline(engine)

    vrun(main())
    assert model.steps[3].rows == model.steps[0].rows  # the row too many that A ran
    assert (model.steps[4].rows == model.steps[3].rows).all() == (rows == 1)
    assert model.steps[4].positions.tolist() == list(range(6))  # it is B's prompt


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_request_keeps_its_row_over_all_chunks(vrun, monkeypatch, depth):
    """C05"""
    monkeypatch.setattr(Limits, "rows", property(lambda limits: 2))
    model = WatchedModel()
    a, b, c = prompt(1, 40), prompt(2, 9), prompt(3, 9)

    async def main():
        async with small_engine(
            model, overlap_depth=depth, max_running_requests=3, prefill_chunk_tokens=8, page_size=4
        ) as engine:
            streams = [engine.generate(a, greedy(6))]
            arrivals = {
                3: lambda: streams.append(engine.generate(b, greedy(12))),
                4: lambda: streams.append(engine.generate(c, greedy(3))),
            }
            before_plan(engine, arrivals)
            assert await tokens_of(streams[0]) == oracle(a, 6)
            assert await tokens_of(streams[1]) == oracle(b, 12)
            assert await tokens_of(streams[2]) == oracle(c, 3)
            await settle(engine)
            assert_baseline(engine)

    vrun(main())
    assert [step.rows.tolist() for step in model.steps[:5]] == [model.batches[0]] * 5
    assert len(model.batches[0]) == 1
    owners: list[tuple[int, int]] = []  # rows with their generations, in order of appearance
    last_seen: dict[tuple[int, int], int] = {}
    for step in model.steps:
        stays = list(zip(step.rows.tolist(), step.generations.tolist(), strict=True))
        owners += [stay for stay in stays if stay not in owners]
        last_seen |= dict.fromkeys(stays, step.step)
        pages = [set(table[table > 0].tolist()) for table in step.page_tables]
        assert sum(map(len, pages)) == len(set().union(*pages)), "a page under two owners"
    (row_a, _), (row_b, _), third = owners
    assert {row_a, row_b} == {1, 2}
    first_of_c = next(s.step for s in model.steps if s.generations.max() == third[1])
    assert third[0] in (row_a, row_b)
    assert first_of_c > last_seen[owners[[row_a, row_b].index(third[0])]]
