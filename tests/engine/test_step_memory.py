"""What overlap gains in time, and that it costs no memory: tensors die with their step."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections import defaultdict
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from engines import (
    DEPTHS,
    greedy,
    prompt,
    small_engine,
)

from aiosched.device.sim import SimDevice
from aiosched.model.inputs import StepInputs
from aiosched.model.runner import ModelRunner
from aiosched.scheduler.results import ResultProcessor
from aiosched.testing.hash_model import HashModel, oracle


@pytest.mark.parametrize(("depth", "most"), [(0, 1.600), (1, 1.070), (2, 1.070)])
def test_host_work_hides_behind_device_work(vrun, clock, monkeypatch, depth, most):
    """C13: 100 steps of 10 ms on the device and 6 ms on the host."""
    device = SimDevice(forward_time=0.010)
    process = ResultProcessor.process_batch_result

    def slowly(*args: Any) -> None:
        process(*args)
        clock.spend(0.006)  # synchronous: it holds the event loop, as host work does

    monkeypatch.setattr(ResultProcessor, "process_batch_result", slowly)

    async def main():
        async with small_engine(device=device, overlap_depth=depth) as engine:
            began = clock.time()
            await engine.complete(prompt(1, 8), greedy(100))
            took = clock.time() - began
            assert engine.stats().steps == 100
            assert took >= 1.0
            assert took == pytest.approx(most) if depth == 0 else took <= most
            assert engine.stats().device_seconds == pytest.approx(1.0)
            if depth:
                assert engine.stats().idle_gap_seconds == pytest.approx(0.0)

    vrun(main())
    streams = defaultdict(set)
    for record in device.trace:
        streams[record.label].add(record.stream)
    assert streams == {"stage": {"schedule"}, "forward": {"forward"}, "copy": {"copy"}}


class MortalModel(HashModel):
    """Keeps weak references to the tensors of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: dict[int, list[weakref.ref[torch.Tensor]]] = {}

    def forward(self, inputs: Any, kv: object) -> torch.Tensor:
        logits = super().forward(inputs, kv)
        alive = (logits, inputs.input_ids, inputs.positions, inputs.slots, inputs.page_tables)
        self.tensors[inputs.host.step] = [weakref.ref(tensor) for tensor in alive]
        return logits


@pytest.mark.parametrize("depth", DEPTHS)
def test_the_tensors_of_a_step_die_once_no_stream_reads_them(vrun, monkeypatch, depth):
    """C14: those of step N are dead when N + depth + 1 is launched, without the collector."""
    model = MortalModel()
    launch = ModelRunner.launch
    checked = []

    def checking(runner: ModelRunner, inputs: StepInputs) -> Any:
        for step in range(1, inputs.step - depth):
            assert not any(tensor() is not None for tensor in model.tensors[step])
            checked.append(step)
        return launch(runner, inputs)

    monkeypatch.setattr(ModelRunner, "launch", checking)

    async def main():
        async with small_engine(model, overlap_depth=depth) as engine:
            prompts = [prompt(i, 5 + 40 * i) for i in range(3)]
            answers = await asyncio.gather(*(engine.complete(p, greedy(9)) for p in prompts))
            assert [list(a.token_ids) for a in answers] == [oracle(p, 9) for p in prompts]

    gc.disable()
    try:
        vrun(main())
    finally:
        gc.enable()
    assert max(checked) > 5


class RecyclingTransfers:
    """An allocator that hands a block out again the moment its last reader is gone."""

    def __init__(self) -> None:
        self.free: list[np.ndarray] = []
        self.reused = 0

    def together(self):
        return nullcontext(self._to_device)

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        place = next((i for i, b in enumerate(self.free) if len(b) >= array.nbytes), None)
        self.reused += place is not None
        block = np.empty(max(array.nbytes, 64), np.uint8) if place is None else self.free.pop(place)
        view = block[: array.nbytes].view(array.dtype).reshape(array.shape)
        view[...] = array
        weakref.finalize(view, self._give_back, block)  # torch keeps the view with the storage
        return torch.from_numpy(view)

    def to_host(self, tensor: torch.Tensor) -> np.ndarray:
        return tensor.numpy()

    def _give_back(self, block: np.ndarray) -> None:
        block[:] = 0xFF
        self.free.append(block)


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_buffer_is_freed_only_after_the_last_stream_that_reads_it(vrun, monkeypatch, depth):
    """C14: a freed buffer is overwritten at once, and every answer is right all the same."""
    transfers = RecyclingTransfers()
    monkeypatch.setattr("aiosched.model.runner.transfers_of", lambda device: transfers)
    device = SimDevice(forward_time=0.010, copy_time=0.004, stage_time=0.003)
    prompts = [prompt(i, 5 + 9 * i) for i in range(4)]

    async def main():
        async with small_engine(
            device=device, overlap_depth=depth, prefill_chunk_tokens=16
        ) as engine:
            answers = await asyncio.gather(
                *(engine.complete(p, greedy(7 + i)) for i, p in enumerate(prompts))
            )
            assert [list(a.token_ids) for a in answers] == [
                oracle(p, 7 + i) for i, p in enumerate(prompts)
            ]

    vrun(main())
    assert transfers.reused > 50
