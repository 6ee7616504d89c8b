"""``aiosched bench gpu``: every part at tiny size on the CPU, and one that fails."""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from paged_steps import PagedSequences

from aiosched.bench.gpu import (
    bandwidth,
    bare,
    continuous_batching,
    equality,
    step,
    wake_up,
)
from aiosched.bench.gpu.decode_step import decode_step, extend_step
from aiosched.bench.gpu.parts import run_part
from aiosched.bench.gpu.settings import PARTS, TIME_LIMIT, TINY, TINY_MODELS, Part, Settings
from aiosched.bench.gpu.timing import seconds_per_call
from aiosched.cli.app import app

SETTINGS = Settings(device="cpu", model=TINY_MODELS[1], **TINY)


def rows_of(part, settings=SETTINGS):
    async def collect():
        return [row async for row in part.measure(settings)]

    return asyncio.run(collect())


def test_the_bandwidth_counts_bytes_read_and_written():
    (row,) = rows_of(bandwidth)
    assert row["gb_s"] > 0


def test_the_wake_up_is_measured_for_each_way_to_wait():
    (row,) = rows_of(wake_up)
    assert row["waiting"] == "worker thread"
    assert row["looking_us"] >= 300
    assert row["low_us"] <= row["wake_up_us"] <= row["high_us"]


@pytest.mark.parametrize("model", TINY_MODELS, ids=["llama", "qwen3"])
def test_a_step_is_measured_under_both_loops_and_against_the_bare_forward(model):
    rows = rows_of(step, Settings(device="cpu", model=model, **TINY))
    assert [(row["batch"], row["loop"]) for row in rows] == [
        (1, "normal"),
        (1, "overlap"),
        (3, "normal"),
        (3, "overlap"),
    ]
    for row in rows:
        assert row["bare"] == "forward"
        assert row["ratio"] == pytest.approx(row["step_ms"] / row["bare_ms"])
        assert row["tok_s"] == pytest.approx(1e3 * row["batch"] / row["step_ms"])
        assert {"idle_gap_ms", "idle_gap_pct", "device_ms", "host_ms", "floor_ms"} <= row.keys()


def test_a_captured_forward_is_replayed_and_timed_by_events(monkeypatch):
    done = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            done.append("event")

        def synchronize(self):
            done.append("wait")

        def elapsed_time(self, end):
            return 10.0  # milliseconds

    class Graph:
        def replay(self):
            done.append("replay")

    fakes = {
        "Event": Event,
        "CUDAGraph": Graph,
        "Stream": lambda device: None,
        "stream": nullcontext,
        "device": nullcontext,
        "graph": lambda graph, capture_error_mode: nullcontext(),
        "synchronize": lambda device: done.append("synchronize"),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    replay = bare._captured(lambda: done.append("forward"), "cuda")
    assert done == ["synchronize", "forward", "forward", "synchronize", "forward"]
    done.clear()
    assert seconds_per_call(replay, "cuda", calls=2, rounds=1) == 0.005
    warm_up = ["replay"] * 3
    assert done == [*warm_up, "synchronize", "event", "replay", "replay", "event", "wait"]


def test_transformers_runs_beside_it():
    rows = rows_of(continuous_batching)
    assert [row["batch"] for row in rows] == [1, 3]
    assert all(row["step_ms"] > 0 for row in rows)


def test_without_a_gpu_the_equality_is_skipped_and_says_why():
    (row,) = rows_of(equality)
    assert "GPU" in row["skipped"]


def test_logits_that_differ_by_rounding_are_equal_and_others_are_not():
    logits = torch.tensor([[1.0, 5.0, 2.0], [4.0, 0.0, 1.0]])
    assert equality.compare(logits + 0.001, logits)["equal"]
    other = logits.clone()
    other[1, 2] = 9.0
    found = equality.compare(other, logits)
    assert (found["equal"], found["same_token"]) == (False, "1 of 2")


def test_steps_of_transformers_are_counted_only_while_all_sequences_decode():
    alone, both = [0.0, 1.0, 2.0, 4.0, 6.0, 8.0], [4.0, 6.0, 8.0, 10.0]
    assert continuous_batching.step_seconds([alone, both]) == [2.0] * 4
    with pytest.raises(ValueError, match="never"):
        continuous_batching.step_seconds([[0.0, 1.0], [2.0, 3.0]])


def test_an_embedding_that_is_no_output_layer_does_not_count_as_read():
    shape = "dummy:llama?hidden_size=8&intermediate_size=8&num_hidden_layers=0&vocab_size=100"
    one = 100 * 8 * 4  # an embedding in float32; the last norm is 8 more numbers
    for tied in ("true", "false"):
        found = step.weight_bytes(f"{shape}&num_attention_heads=2&tie_word_embeddings={tied}",
                                  "float32")  # fmt: skip
        assert found == one + 8 * 4


def test_hand_made_steps_are_those_of_sequences_in_their_pages():
    lengths = [3, 8, 1]
    made = extend_step(lengths, page_size=4)
    there = PagedSequences(20, page_size=4).step({}, {i: [0] * n for i, n in enumerate(lengths)})
    for field in ("query_start", "seq_lens", "positions", "logits_index", "sample_sequence"):
        assert np.array_equal(getattr(made, field), getattr(there.host, field)), field
    assert len(set(made.slots.tolist())) == sum(lengths)
    decodes = decode_step(2, 9, page_size=4)
    assert decodes.page_tables.tolist() == [[1, 2, 3], [4, 5, 6]]
    assert decodes.slots.tolist() == [12, 24]


def part_that(script: str, seconds: float = 30.0):
    """The rows of a part whose process runs ``script``."""

    async def collect():
        command = (sys.executable, "-c", script)
        rows = run_part(Part(name="x", seconds=1), SETTINGS, seconds, command)
        return [row async for row in rows]

    return asyncio.run(collect())


def test_a_part_that_dies_leaves_its_rows_and_its_last_words():
    rows = part_that("print('{\"a\": 1}', flush=True); raise MemoryError('no more')")
    assert rows == [{"a": 1}, {"error": "exit code 1: MemoryError: no more"}]


def test_a_part_that_reports_an_error_reports_it_once():
    rows = part_that('print(\'{"error": "why"}\', flush=True); raise SystemExit(1)')
    assert rows == [{"error": "why"}]


def test_a_part_that_hangs_is_ended():
    rows = part_that("import signal; signal.pause()", seconds=0.2)
    assert rows == [{"error": "ended after 0 s"}]


def test_all_parts_together_stay_under_nine_minutes():
    assert TIME_LIMIT < 540
    assert all(part.seconds < TIME_LIMIT for part in PARTS)


def test_the_command_runs_a_part_in_a_process_and_prints_one_object():
    arguments = ["bench", "gpu", "--device", "cpu", "--tiny", "--part", "bandwidth", "--json"]
    result = CliRunner().invoke(app, arguments, prog_name="aiosched")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    (row,) = report["rows"]
    assert row["part"] == "bandwidth"
    assert row["gb_s"] > 0
    assert report["settings"]["device"] == "cpu"
    assert "pytest -m cuda" in " ".join(report["notes"])


def test_other_models_than_random_ones_are_refused():
    arguments = ["bench", "gpu", "--device", "cpu", "--model", "smollm2-135m-instruct"]
    result = CliRunner().invoke(app, arguments, prog_name="aiosched")
    assert result.exit_code == 2
    assert "dummy:" in result.output
