"""``aiosched bench host``, at tiny size: that it runs, what it prints, and what it takes apart."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from aiosched.bench import host
from aiosched.bench.measure import Spread
from aiosched.bench.null_device import CannedResults
from aiosched.bench.parts import NAMES, Parts
from aiosched.bench.steady import FEATURES, Load, Steady, Vocabulary, plain_asyncio
from aiosched.model.inputs import StepInputs

TINY = Load(batch=3, window=2, windows=2)
VOCABULARY = Vocabulary(64, (0, 1))


class Letters:
    """A tokenizer of one character a token."""

    vocab_size = 64
    special_ids = frozenset({0, 1})
    chat_template = None

    def encode(self, text, *, add_special_tokens=True):
        return [ord(c) % 64 for c in text]

    def decode(self, ids, skip_special_tokens=True):
        return "".join(chr(48 + i) for i in ids)

    def render_chat(self, messages, add_generation_prompt=True):
        return ""


def test_the_command_prints_a_row_for_each_batch_with_a_column_for_each_part(monkeypatch):
    monkeypatch.setattr(host, "load_tokenizer", Letters)
    args = ["--batch", "1", "--batch", "3", "--rounds", "1", "--steps", "2", "--json"]
    result = CliRunner().invoke(host.command, args, catch_exceptions=False)
    rows = json.loads(result.stdout)["rows"]
    assert [row["batch"] for row in rows] == [1, 3]
    for row in rows:
        assert row["us_per_step"] > 0
        assert {*NAMES, "turn", "fan-out", "detokenize", "floor_us", "low", "high"} <= row.keys()


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_every_set_of_features_decodes_steadily_at_every_depth(features, depth):
    load = Load(batch=2, depth=depth, features=features, window=2, windows=2)
    assert len(asyncio.run(Steady(load, VOCABULARY, Letters()).run())) == 2


def test_the_parts_of_a_step_are_each_timed_in_every_window():
    parts = Parts()
    asyncio.run(Steady(TINY, VOCABULARY, read=False, parts=parts).run())
    assert len(parts.windows) == TINY.windows
    for window in parts.windows:
        assert all(window[name] > 0 for name in NAMES)


def test_the_columns_of_a_row_add_up_to_the_whole():
    us = {"whole": 100.0, "no text": 80.0, "nobody reads": 50.0, "floor": 10.0}
    spreads = {side: Spread(value, value, value, 1) for side, value in us.items()}
    window = dict.fromkeys(NAMES, 10e-6 * TINY.window)
    row = host.as_row(TINY, spreads, [window])
    assert row["detokenize"] == pytest.approx(20)
    assert row["fan-out"] == pytest.approx(30)
    assert row["turn"] == pytest.approx(10)
    parts = [row[name] for name in (*NAMES, "turn", "fan-out", "detokenize")]
    assert sum(parts) == pytest.approx(row["us_per_step"])


def test_a_window_is_made_of_whole_pages_whatever_the_batch():
    assert [host.window_of(batch) % 16 for batch in host.BATCHES] == [0] * len(host.BATCHES)
    assert host.window_of(1) > host.window_of(4096) >= 16


def test_canned_results_have_a_token_for_each_row_that_samples_and_none_that_is_left_out():
    results = CannedResults.drawn(8, without=(2, 5))
    inputs = StepInputs.empty(16)
    for rows in (1, 100, 4096):
        results.launched(SimpleNamespace(step=rows, sample_sequence=range(rows)))
        tokens = results.landed(rows).tokens
        assert len(tokens) == rows
        assert not {2, 5} & {*tokens.tolist()}
    results.launched(inputs)
    assert len(results.landed(inputs.step).tokens) == 0


def test_plain_asyncio_gives_a_time_for_each_window():
    ticks = iter(range(100))
    assert asyncio.run(plain_asyncio(2, 4, 3, clock=lambda: float(next(ticks)))) == [0.25] * 3
