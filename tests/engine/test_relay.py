"""Sampled tokens reach the next step through the relay: each its own request's, exactly once."""

from __future__ import annotations

import asyncio
from collections import defaultdict

import pytest
import torch
from engines import (
    DEPTHS,
    WatchedModel,
    assert_baseline,
    before_plan,
    greedy,
    prompt,
    settle,
    small_engine,
    tokens_of,
    until,
)

from aiosched.device.sim import SimDevice
from aiosched.scheduler.future_map import POISON, FutureMap
from aiosched.testing.hash_model import oracle


class RelayLog:
    """What went in and out of the relay: (row, generation) → tokens, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.read: dict[tuple[int, int], list[int]] = defaultdict(list)
        self.written: dict[tuple[int, int], list[int]] = defaultdict(list)
        gather, stash = FutureMap.gather, FutureMap.stash

        def logged_gather(relay, rows, generations):
            tokens = gather(relay, rows, generations)
            self._note(self.read, rows, generations, tokens)
            return tokens

        def logged_stash(relay, rows, generations, tokens):
            self._note(self.written, rows, generations, tokens)
            stash(relay, rows, generations, tokens)

        monkeypatch.setattr(FutureMap, "gather", logged_gather)
        monkeypatch.setattr(FutureMap, "stash", logged_stash)

    def _note(self, log, *columns: torch.Tensor) -> None:
        for row, generation, token in zip(*(c.tolist() for c in columns), strict=True):
            log[row, generation].append(token)


@pytest.mark.invariant(1)
@pytest.mark.parametrize("depth", [1, 2])
def test_every_relayed_value_is_read_exactly_once_by_its_own_request(vrun, monkeypatch, depth):
    """C01, and invariant 1: a step reads what the request's latest step wrote, in its epoch."""
    log = RelayLog(monkeypatch)
    prompts = [prompt(i, 128) for i in range(64)]

    async def main():
        async with small_engine(
            overlap_depth=depth, kv_tokens=12 * 136, prefill_chunk_tokens=16
        ) as engine:
            answers = await asyncio.gather(
                *(engine.complete(p, greedy(2 + i % 5)) for i, p in enumerate(prompts))
            )
            await settle(engine)
            assert_baseline(engine)
            return [list(answer.token_ids) for answer in answers]

    answers = vrun(main())
    assert answers == [oracle(p, 2 + i % 5) for i, p in enumerate(prompts)]
    assert len(log.written) == 64  # one row and generation for each request
    assert sorted(log.written.values()) == sorted(answers)
    for owner, written in log.written.items():
        assert log.read[owner] == written[:-1]  # in order, once; the last is of no use to anybody
        assert POISON not in log.read[owner]


@pytest.mark.parametrize("depth", DEPTHS)
def test_chunks_that_are_not_the_last_leave_no_token_anywhere(vrun, monkeypatch, depth):
    """C02"""
    log = RelayLog(monkeypatch)
    model, device = WatchedModel(), SimDevice()
    short = [prompt(i, 5) for i in range(6)]
    long = [prompt(10 + i, 96) for i in range(2)]

    async def main():
        async with small_engine(
            model, device, overlap_depth=depth, prefill_chunk_tokens=16, kv_tokens=2048
        ) as engine:
            decoding = [engine.generate(p, greedy(40)) for p in short]
            reading = []

            def arrive():
                reading.extend(engine.generate(p, greedy(3)) for p in long)

            before_plan(engine, {4: arrive})
            everybody = asyncio.gather(*map(tokens_of, decoding))
            await until(lambda: reading)
            assert await asyncio.gather(*map(tokens_of, reading)) == [oracle(p, 3) for p in long]
            assert await everybody == [oracle(p, 40) for p in short]
            await settle(engine)
            assert engine.stats().tokens == 6 * 40 + 2 * 3

    vrun(main())
    middle = [step for step in model.steps if step.num_tokens > step.num_sequences]
    assert len(middle) >= 12
    assert sorted(map(len, log.written.values())) == [3, 3, *[40] * 6]


def test_a_late_write_of_an_earlier_owner_does_not_replace_the_new_owners_token(vrun):
    """C06"""

    async def main():
        device, relay = SimDevice(), FutureMap(2, debug=True)
        device.open(asyncio.get_running_loop())
        row = torch.tensor([1])
        device.hold(step=1)
        late = device.forward.launch(
            lambda: relay.stash(row, torch.tensor([1]), torch.tensor([11])), step=1, label="old"
        )
        relay.stash(row, torch.tensor([2]), torch.tensor([22]))  # from the host
        read = device.forward.launch(
            lambda: relay.gather(row, torch.tensor([2])), step=2, label="new"
        )
        device.release()
        await late
        assert (await read).tolist() == [22]
        device.close(1.0)

    vrun(main())


@pytest.mark.parametrize("depth", DEPTHS)
def test_the_device_sees_each_position_of_a_request_once_and_in_order(vrun, depth):
    """C12"""
    model = WatchedModel()
    mine, others = prompt(1, 7), [prompt(2 + i, 20) for i in range(3)]

    async def main():
        async with small_engine(model, overlap_depth=depth) as engine:
            streams = []

            def arrive():
                streams.append(engine.generate(others[len(streams)], greedy(4)))

            before_plan(engine, {2: arrive, 3: arrive, 6: arrive})
            assert await tokens_of(engine.generate(mine, greedy(10))) == oracle(mine, 10)
            for stream, p in zip(streams, others, strict=True):
                assert await tokens_of(stream) == oracle(p, 4)
            await settle(engine)

    vrun(main())
    row = model.batches[0][0]
    seen: list[int] = []
    for step in model.steps[:10]:
        sequence = step.rows.tolist().index(row)
        start, end = step.query_start[sequence : sequence + 2]
        seen += step.positions[start:end].tolist()
    assert seen == list(range(16))
    mixed = [s.step for s in model.steps if 0 < s.num_decodes < s.num_sequences]
    assert mixed == [2, 3, 6]
