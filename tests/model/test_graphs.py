"""What surrounds a graph, with a graph that records calls in place of kernels."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch

from aiosched.model.graphs import DecodeGraphs, PlannedModel, capture_sizes
from aiosched.model.inputs import DeviceInputs, PromptLogprobInputs, StepInputs
from aiosched.model.staging import stage_step

VOCAB, PAGE, MAX_BATCH, MAX_PAGES = 30, 4, 12, 6


@dataclass
class RecordedGraph:
    """Replays the forward it saw, into the same output: what CUDA does with kernels."""

    calls: list[tuple[PlannedSum, DeviceInputs, object, torch.Tensor]] = field(default_factory=list)

    def pool(self) -> tuple[int, int]:
        return (0, 1)

    def replay(self) -> None:
        for model, inputs, kv, out in self.calls:
            out.copy_(model.compute(inputs, kv))


class PlannedSum:
    """Next id: the sum of all ids in the pages of the sequence."""

    vocab_size = VOCAB
    max_model_len = PAGE * MAX_PAGES
    eos_token_ids = ()

    def __init__(self) -> None:
        self.capturing: RecordedGraph | None = None
        self.planned: list[StepInputs] = []
        self.captures: list[int] = []

    def kv_bytes_per_token(self) -> int:
        return 8

    def make_kv(self, num_pages: int, page_size: int) -> object:
        return torch.zeros((num_pages + 1) * page_size, dtype=torch.int64)

    def plan(self, inputs: DeviceInputs, kv: object) -> None:
        assert self.capturing is None
        self.planned.append(inputs.host)

    def forward(self, inputs: DeviceInputs, kv: object) -> torch.Tensor:
        out = self.compute(inputs, kv)
        if self.capturing is not None:
            self.captures.append(len(inputs.input_ids))
            self.capturing.calls.append((self, inputs, kv, out))
        return out

    def compute(self, inputs: DeviceInputs, kv: object) -> torch.Tensor:
        assert isinstance(kv, torch.Tensor)
        kv[inputs.slots] = inputs.input_ids
        offsets = torch.arange(PAGE)
        slots = (inputs.page_tables.long()[:, :, None] * PAGE + offsets).flatten(1)
        inside = torch.arange(slots.shape[1]) < inputs.seq_lens[:, None]
        sums = (kv[slots] * inside).sum(1) % VOCAB
        return torch.nn.functional.one_hot(sums, VOCAB).float()[inputs.logits_index]


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> PlannedSum:
    model = PlannedSum()

    @contextmanager
    def capture(graph: RecordedGraph, **_: object) -> Iterator[None]:
        model.capturing = graph
        yield
        model.capturing = None

    monkeypatch.setattr(torch.cuda, "CUDAGraph", RecordedGraph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    return model


def decode_step(lengths: list[int], pages: int = MAX_PAGES, seed: int = 0) -> StepInputs:
    """Sequences that decode at these KV lengths, each with pages of its own."""
    n = len(lengths)
    rng = np.random.default_rng(seed)
    tables = (1 + np.arange(n)[:, None] * MAX_PAGES + np.arange(pages)).astype(np.int32)
    positions = np.array(lengths, np.int64) - 1
    every = np.arange(n)
    return StepInputs(
        step=1,
        page_size=PAGE,
        num_decodes=n,
        rows=every + 1,
        generations=np.ones(n, np.int64),
        query_start=np.arange(n + 1, dtype=np.int32),
        seq_lens=np.array(lengths, np.int32),
        page_tables=tables,
        input_ids=rng.integers(0, VOCAB, n),
        positions=positions,
        slots=tables[every, positions // PAGE].astype(np.int64) * PAGE + positions % PAGE,
        logits_index=every,
        sample_sequence=every,
    )


def staged(step: StepInputs) -> DeviceInputs:
    return stage_step(step, VOCAB, torch.from_numpy).inputs


def graphs_over(model: PlannedSum) -> tuple[DecodeGraphs, torch.Tensor]:
    kv = model.make_kv(MAX_BATCH * MAX_PAGES, PAGE)
    assert isinstance(kv, torch.Tensor)
    kv.random_(0, VOCAB, generator=torch.Generator().manual_seed(0))
    return DecodeGraphs(model, kv, MAX_BATCH, MAX_PAGES, "cpu"), kv


def test_sizes_grow_in_steps_and_end_with_the_largest_batch() -> None:
    assert capture_sizes(1) == [1]
    assert capture_sizes(12) == [1, 2, 4, 8, 12]
    assert capture_sizes(33) == [1, 2, 4, 8, 16, 24, 32, 33]


def test_a_replayed_batch_gives_the_logits_of_a_plain_forward(model: PlannedSum) -> None:
    graphs, kv = graphs_over(model)
    assert isinstance(model, PlannedModel)
    for seed, lengths in enumerate([[5, 1, 24], [9] * 11, [2], [3, 7], [5, 1, 24, 8], [24] * 12]):
        step = decode_step(lengths, pages=-(-max(lengths) // PAGE), seed=seed)
        plain = model.compute(staged(step), kv.clone())
        got = graphs.forward(staged(step))
        assert torch.equal(got, plain)


def test_a_replay_does_not_ask_again_whether_the_model_plans(
    model: PlannedSum, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs, _ = graphs_over(model)
    graphs.forward(staged(decode_step([5])))
    monkeypatch.delattr("aiosched.model.graphs.PlannedModel")
    graphs.forward(staged(decode_step([6])))


def test_each_size_is_captured_once(model: PlannedSum) -> None:
    graphs, _ = graphs_over(model)
    for n in (3, 4, 3, 1, 9, 12):
        graphs.forward(staged(decode_step([5] * n)))
    assert model.captures == [4, 1, 12]


def test_padding_and_capture_write_to_page_zero_alone(model: PlannedSum) -> None:
    graphs, kv = graphs_over(model)
    step = decode_step([6, 7, 8])
    expected = kv.clone()
    expected[torch.from_numpy(step.slots)] = torch.from_numpy(step.input_ids)
    graphs.forward(staged(step))
    assert torch.equal(kv[PAGE:], expected[PAGE:])


def test_the_planner_sees_the_padded_batch_before_each_replay(model: PlannedSum) -> None:
    graphs, _ = graphs_over(model)
    step = decode_step([6, 7, 8])
    graphs.forward(staged(step))
    planned = model.planned[-1]
    assert planned.num_sequences == planned.num_decodes == 4
    assert planned.rows.tolist() == [1, 2, 3, 0]
    assert planned.seq_lens.tolist() == [6, 7, 8, 1]
    assert planned.page_tables[3].tolist() == [0] * MAX_PAGES
    assert planned.slots[3] == 0
    assert planned.query_start.tolist() == [0, 1, 2, 3, 4]
    before = len(model.planned)
    graphs.forward(staged(step))
    assert len(model.planned) == before + 1


def test_warming_up_captures_all_sizes_the_largest_first(model: PlannedSum) -> None:
    graphs, _ = graphs_over(model)
    graphs.warm_up(page_size=PAGE)
    assert model.captures == [12, 8, 4, 2, 1]
    graphs.forward(staged(decode_step([5] * 5)))
    assert len(model.captures) == 5


def test_warming_up_ends_with_the_size_at_which_it_is_given_up(model: PlannedSum) -> None:
    graphs, _ = graphs_over(model)
    given_up = threading.Event()
    plan = model.plan

    def plan_and_give_up(inputs: DeviceInputs, kv: object) -> None:
        plan(inputs, kv)
        given_up.set()

    model.plan = plan_and_give_up  # type: ignore[method-assign]
    graphs.warm_up(PAGE, given_up)
    assert model.captures == [12]


def test_only_a_batch_of_nothing_but_decodes_fits(model: PlannedSum) -> None:
    graphs, _ = graphs_over(model)
    step = decode_step([3, 4])
    assert graphs.fits(step)
    assert not graphs.fits(decode_step([]))
    assert not graphs.fits(decode_step([3] * (MAX_BATCH + 1)))
    assert not graphs.fits(decode_step([3], pages=MAX_PAGES + 1))
    for change in (
        {"num_decodes": 1},
        {"logits_index": step.logits_index[:1]},
        {"prompt_logprobs": PromptLogprobInputs(*[np.zeros(1, np.int64)] * 3)},
    ):
        assert not graphs.fits(replace(step, **change))
