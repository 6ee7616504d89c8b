"""Several steps in flight never see each other's data, and nothing is touched before its event."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
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
    turns,
)

from aiosched.device.sim import SimDevice, SimStream
from aiosched.model.inputs import StepInputs
from aiosched.model.runner import ModelRunner
from aiosched.scheduler.requests import Request
from aiosched.testing.hash_model import HashModel, oracle


def arrays(record: Any) -> list[np.ndarray]:
    """All arrays of a step's inputs, those of its sampling included."""
    fields = [getattr(record, name) for name in record.__slots__]
    found = [value for value in fields if isinstance(value, np.ndarray)]
    for value in fields:
        if hasattr(value, "__slots__") and not isinstance(value, np.ndarray):
            found += arrays(value)
    return found


class LaunchLog:
    """What the runner was given, with a copy made at that moment, and what it gave back."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.inputs: dict[int, StepInputs] = {}
        self.copies: dict[int, StepInputs] = {}
        self.results: dict[int, Any] = {}
        self.runner_state: list[dict[str, int]] = []
        launch = ModelRunner.launch

        def logged(runner: ModelRunner, inputs: StepInputs) -> Any:
            self.inputs[inputs.step] = inputs
            self.copies[inputs.step] = copy.deepcopy(inputs)
            launched = launch(runner, inputs)
            self.results[inputs.step] = launched.result
            self.runner_state.append({name: id(value) for name, value in vars(runner).items()})
            return launched

        monkeypatch.setattr(ModelRunner, "launch", logged)

    def assert_untouched(self) -> None:
        for step, inputs in self.inputs.items():
            for now, then in zip(arrays(inputs), arrays(self.copies[step]), strict=True):
                np.testing.assert_array_equal(now, then)

    def assert_separate(self) -> None:
        """No two steps share an array that somebody could write to, of inputs or results."""
        owned = {
            step: [array for array in arrays(inputs) if array.flags.writeable]
            for step, inputs in self.inputs.items()
        }
        for step, result in self.results.items():
            owned[step].append(result.value.tokens)
        for step, mine in owned.items():
            for other, theirs in owned.items():
                if other > step:
                    assert not any(np.may_share_memory(a, b) for a in mine for b in theirs)


@pytest.mark.parametrize("depth", [1, 2])
def test_planning_drops_requests_that_end_by_max_tokens_without_touching_a_result(vrun, depth):
    """C07: no result has landed (looking at one would raise), and the known ends are gone."""
    model, device = WatchedModel(), SimDevice()
    prompts = [prompt(i, 5) for i in range(4)]
    ends = [depth, depth, 9, 9]

    async def main():
        async with small_engine(model, device, overlap_depth=depth) as engine:
            device.hold(label="copy")
            streams = [engine.generate(p, greedy(n)) for p, n in zip(prompts, ends, strict=True)]
            await turns()
            assert [len(rows) for rows in model.batches] == [4] * depth + [2]
            device.release()
            for stream, p, n in zip(streams, prompts, ends, strict=True):
                assert await tokens_of(stream) == oracle(p, n)

    vrun(main())
    assert sorted(model.sampled.values()) == sorted(ends)


@pytest.mark.invariant(3)
@pytest.mark.parametrize("depth", [1, 2])
def test_a_step_owns_its_page_tables(vrun, monkeypatch, depth):
    """C08, and invariant 3: while step 2 waits for its inputs, later ones get further pages."""
    log, device = LaunchLog(monkeypatch), SimDevice()
    p = prompt(1, 6)

    async def main():
        async with small_engine(device=device, overlap_depth=depth, page_size=1) as engine:
            device.hold(step=2, label="stage")
            stream = engine.generate(p, greedy(8))
            await device.reached(2, "stage")
            await turns()
            table = engine._runtime._state.table.page_table
            row = int(log.inputs[2].rows[0])
            assert max(launches(device)) == 2 + depth
            assert table[row, 7] > 0  # a page that step 2 does not know of
            assert log.inputs[2].page_tables.shape == (1, 7)
            assert not np.may_share_memory(log.inputs[2].page_tables, table)
            log.assert_untouched()
            device.release()
            assert await tokens_of(stream) == oracle(p, 8)
            await settle(engine)
            assert_baseline(engine)
            log.assert_untouched()
            log.assert_separate()

    vrun(main())


def test_late_copies_in_either_direction_carry_their_own_steps_values(vrun, monkeypatch):
    """C09: the inputs of step 2, five rows, are late; step 3, two rows, is planned meanwhile."""
    log, model, device = LaunchLog(monkeypatch), WatchedModel(), SimDevice()
    prompts = [prompt(i, 5) for i in range(5)]
    ends = [2, 6, 2, 6, 2]

    async def main():
        async with small_engine(model, device, overlap_depth=2) as engine:
            device.hold(step=2, label="stage")
            device.hold(label="copy")
            streams = [engine.generate(p, greedy(n)) for p, n in zip(prompts, ends, strict=True)]
            await turns()
            assert launches(device) == [1, 2, 3]
            assert len(model.steps) == 1  # step 2 has not begun
            device.release(step=2, label="stage")
            await turns()
            assert [len(rows) for rows in model.batches] == [5, 5, 2]
            assert engine.stats().steps == 0  # everything is computed, nothing has landed
            device.release(step=1, label="copy")
            await turns()
            assert engine.stats().steps == 1
            assert launches(device) == [1, 2, 3, 4]
            device.release()
            answers = [await tokens_of(stream) for stream in streams]
            assert answers == [oracle(p, n) for p, n in zip(prompts, ends, strict=True)]
            log.assert_untouched()
            log.assert_separate()

    vrun(main())


class PlannerModel(HashModel):
    """Its planner copies from one staging buffer that it hides, and copies late: in ``forward``."""

    def __init__(self) -> None:
        super().__init__()
        self._staging = np.zeros(4096, dtype=np.int64)

    def plan(self, inputs: Any, kv: object) -> None:
        self._staging[:] = -1
        self._staging[: inputs.host.num_tokens] = inputs.host.positions

    def forward(self, inputs: Any, kv: object) -> torch.Tensor:
        planned = self._staging[: inputs.host.num_tokens + 1]
        assert planned.tolist() == [*inputs.host.positions.tolist(), -1]
        return super().forward(inputs, kv)


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_planner_that_hides_a_staging_buffer_plans_each_step_whole(vrun, depth):
    """C10 (CPU), and invariant 3."""
    device = SimDevice()
    prompts = [prompt(i, 4 + i) for i in range(3)]

    async def main():
        async with small_engine(PlannerModel(), device, overlap_depth=depth) as engine:
            device.hold()
            streams = [engine.generate(p, greedy(3 + i)) for i, p in enumerate(prompts)]
            await turns()
            assert len(launches(device)) == depth + 1  # all planned, none has begun
            device.release()
            for i, stream in enumerate(streams):
                assert await tokens_of(stream) == oracle(prompts[i], 3 + i)

    vrun(main())


class ManyCopyQueues(SimDevice):
    """Copies of subsequent steps queue apart, so that a later one may land first."""

    def __init__(self) -> None:
        super().__init__()
        others = [SimStream(self, f"copy-{i}", 0.0) for i in (2, 3)]
        self._queues = (self.copy, *others)
        self._streams = (*self._streams, *others)
        self.copy = self

    def launch(self, fn: Any, *, step: int, **options: Any) -> Any:
        return self._queues[step % 3].launch(fn, step=step, **options)


def test_commit_waits_for_its_own_step_though_a_later_one_has_landed(vrun, monkeypatch):
    """C11"""
    log, device = LaunchLog(monkeypatch), ManyCopyQueues()
    prompts = [prompt(i, 5) for i in range(3)]
    ends = [2, 2, 9]
    sampling = {"frequency_penalty": 0.5, "logprobs": 1}

    async def main():
        async with small_engine(device=device, overlap_depth=2) as engine:
            device.hold(step=1, label="copy")
            device.hold(step=2, label="copy")
            streams = [
                engine.generate(p, greedy(n, **sampling if n > 2 else {}))
                for p, n in zip(prompts, ends, strict=True)
            ]
            await turns()
            assert [log.results[step].done() for step in (1, 2, 3)] == [False, False, True]
            device.release(step=1, label="copy")
            await turns()
            assert log.results[3].done() and not log.results[2].done()
            assert [len(inputs.rows) for inputs in log.inputs.values()] == [3, 3, 1, 1]
            assert engine.stats().steps == 1
            device.release()
            answers = [await tokens_of(stream) for stream in streams]
            assert answers[:2] == [oracle(p, 2) for p in prompts[:2]]
            await settle(engine)
            log.assert_untouched()
            log.assert_separate()

    vrun(main())
    assert len({tuple(state.items()) for state in log.runner_state}) == 1


def test_planning_a_decode_step_changes_nothing_on_the_requests(vrun):
    """C11: what is per step is with the step."""
    device = SimDevice()

    def seen(request: Request) -> dict[str, Any]:
        return {
            name: list(value) if isinstance(value := getattr(request, name), list) else value
            for name in Request.__slots__
            if name != "__weakref__"
        }

    async def main():
        async with small_engine(device=device, overlap_depth=2) as engine:
            streams = [engine.generate(prompt(i, 5), greedy(9)) for i in range(2)]
            device.hold(step=3, label="forward")
            await device.reached(3)
            state = engine._runtime._state
            before = [seen(request) for request in state.running.requests]
            planned = state.step
            assert engine._runtime._scheduler.plan().step == planned + 1
            assert [seen(request) for request in state.running.requests] == before
            for stream in streams:
                stream.abort()
            device.release()
            await turns()

    vrun(main())
