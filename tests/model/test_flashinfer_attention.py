"""What FlashInfer is told about a step, and when it is used at all. The rest needs a GPU."""

from __future__ import annotations

import numpy as np
import torch
from fake_cuda import FakeCuda
from paged_steps import PagedSequences

from aiosched.model.flashinfer_attention import Stage, Stages, page_lists, usable_for
from aiosched.model.loader import load_model


def test_page_lists_name_the_used_pages_of_each_sequence_and_no_padding() -> None:
    sequences = PagedSequences(20, page_size=4)
    first = sequences.step({}, {"a": [1] * 8, "b": [1] * 3})
    step = sequences.step({"a": 1}, {"b": [1] * 9}).host

    indptr, indices, last_page = page_lists(step)

    assert indptr.tolist() == [0, 3, 6]
    assert last_page.tolist() == [1, 4]
    expected = [*step.page_tables[0, :3], *step.page_tables[1, :3]]
    assert indices.tolist() == expected
    assert 0 not in indices
    assert {array.dtype for array in (indptr, indices, last_page)} == {np.dtype(np.int32)}
    assert page_lists(first.host)[0].tolist() == [0, 2, 3]


def test_a_stage_is_taken_again_only_when_its_copies_are_done() -> None:
    gpu = FakeCuda()
    stages = Stages(lambda: Stage([], torch.empty(0, dtype=torch.int32), gpu.Event()))

    def plan() -> Stage:
        stage = stages.take()
        stage.copied.record()
        return stage

    in_flight = [plan() for _ in range(10)]  # a depth of 8, and the GPU has not begun
    assert len(set(map(id, in_flight))) == 10
    gpu.run()
    assert [plan() for _ in range(10)] == in_flight
    assert gpu.synchronizing == []  # nobody waited


def test_a_model_on_the_cpu_does_not_plan() -> None:
    model = load_model("dummy:llama?hidden_size=32&num_attention_heads=4&num_hidden_layers=1"
                       "&intermediate_size=32&vocab_size=61")  # fmt: skip
    assert not usable_for(model)
    assert not hasattr(model, "plan")
