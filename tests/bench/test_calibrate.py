"""``aiosched bench calibrate``: that it runs, and what it makes of what it measured."""

from __future__ import annotations

import asyncio
import json

import pytest
from click.testing import CliRunner
from simulations import calibration

from aiosched.bench.calibrate import terms
from aiosched.bench.calibration_run import measure
from aiosched.bench.clients import ClientLoad
from aiosched.bench.live_and_simulated import check_trace, comparison
from aiosched.cli.app import app
from aiosched.commands.plug import Plug
from aiosched.config import EngineConfig
from aiosched.simulate.cost import Calibration
from aiosched.simulate.serve import Served
from aiosched.testing.hash_model import HashModel

QUICK = ("--device", "cpu", "--seconds", "0.01", "--rounds", "1", "--max-model-len", "64",
         "--kv-tokens", "4096")  # fmt: skip


def invoke(*arguments, out):
    result = CliRunner().invoke(
        app, ["bench", "calibrate", "--out", str(out), *QUICK, *arguments], obj=Plug(HashModel())
    )
    assert result.exit_code == 0, result.output
    return result.stdout


def test_it_writes_a_calibration_and_prints_its_numbers(tmp_path):
    out = tmp_path / "calibration.json"
    shown = invoke("--batch", "1", "--batch", "4", out=out)
    made = Calibration.read(out)
    assert (made.model, made.overlap_depth, made.kv_tokens) == ("HashModel", 1, 4096)
    assert made.max_model_len == 64
    assert made.device_fit.steps > 10
    assert "rows decode" in shown
    assert "the fit misses a step by" in shown


def test_with_check_the_rows_hold_both_sides_of_each_mean(tmp_path):
    shown = invoke("--batch", "4", "--check", "--requests", "3", "--json", out=tmp_path / "c.json")
    report = json.loads(shown)
    assert report["benchmark"] == "calibrate"
    assert [row["mean"] for row in report["rows"]] == ["ttft_ms", "tpot_ms", "e2e_ms"]
    for row in report["rows"]:
        assert row.keys() >= {"real", "simulated", "difference"}


def test_the_check_serves_its_trace_once_a_round():
    load = ClientLoad(batches=(4,), seconds=0.01, rounds=2)
    config = EngineConfig(device="cpu", kv_tokens=8192, max_model_len=512, overlap_depth=1)
    measured = asyncio.run(measure(HashModel(), config, load, requests=3))
    assert [len(answers) for answers in measured.real] == [3, 3]
    assert all(answer.error is None for answers in measured.real for answer in answers)


def test_the_trace_of_the_check_comes_at_a_rate_that_the_machine_can_bear():
    device = calibration().device
    trace = check_trace(device, 40, seed=0)
    seconds = trace[-1].arrival
    work = sum(0.010 * r.output_tokens + 0.001 * r.prompt_tokens for r in trace)
    assert 1.0 < work / seconds < 8.0


def answer(ttft, end):
    return Served(index=0, replica=0, arrival=0.0, ttft=ttft, end=end, tokens=11, cached_tokens=0)


def test_a_comparison_says_how_far_the_simulation_is_off():
    real = [[answer(0.1, 1.1)], [answer(0.3, 1.3)]]
    ttft, tpot, e2e = comparison(real, [answer(0.22, 1.32)])
    assert (ttft["real"], ttft["real_low"], ttft["real_high"]) == pytest.approx((200, 100, 300))
    assert ttft["difference"] == "+10.0%"
    assert tpot["simulated"] == pytest.approx(110)
    assert e2e["difference"] == "+10.0%"


def test_every_number_of_a_calibration_is_shown_in_microseconds():
    shown = {(row["of"], row["term"]): row["us"] for row in terms(calibration())}
    assert shown["device", "0 rows decode"] == pytest.approx(10_000)
    assert shown["device", "1000 prompt tokens"] == pytest.approx(1e6)
    assert shown["host", "prefill_rows"] == 0
