from __future__ import annotations

import json
from pathlib import Path

import pytest
from click import ClickException
from observe.recorded import step
from talking_model import Cli

from aiosched.cli.timeline import STEPS, WARM_UP, steady, typical


def test_both_loops_are_drawn_on_a_simulated_device(cli: Cli, tmp_path: Path) -> None:
    out = tmp_path / "loops.html"
    result = cli("timeline", str(out), "--streams", "2", "--device-ms", "0.5")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith(f"{out}: From ")
    text = out.read_text(encoding="utf-8")
    assert "normal loop" in text and "overlap loop, depth 1" in text
    assert "Simulated device, 0.5 ms a step; the host serves 2 streams" in text


def test_a_real_model_is_drawn_too_and_json_is_a_trace(cli: Cli, tmp_path: Path) -> None:
    out = tmp_path / "loops.json"
    flags = ("--model", "talking", "--device", "cpu", "--streams", "2", "--depth", "2")
    result = cli("timeline", str(out), *flags)
    assert result.exit_code == 0, result.stderr
    trace = json.loads(out.read_text(encoding="utf-8"))
    names = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"]
    assert names == ["normal loop", "overlap loop, depth 2"]
    for process, depth in ((1, 0), (2, 2)):
        events = [e for e in trace["traceEvents"] if e["pid"] == process]
        assert {e["args"]["depth"] for e in events if e["name"].startswith("decode")} == {depth}


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("a.png",), "OUT must end with .html or .json"),
        (("a.html", "--model", "m", "--device-ms", "2"), "--device-ms is for the simulated device"),
        (("a.html", "--device", "cpu"), "--device needs --model"),
        (("a.html", "--kv-tokens", "64"), "--kv-tokens needs --model"),
    ],
)
def test_what_does_not_go_together_is_refused(
    cli: Cli, tmp_path: Path, flags: tuple[str, ...], said: str
) -> None:
    result = cli("timeline", str(tmp_path / flags[0]), *flags[1:])
    assert result.exit_code == 2
    assert said in result.stderr


def test_only_decode_steps_of_all_streams_are_drawn_and_not_the_first_of_them() -> None:
    records = [step(1, 100.0, mode="extend"), step(2, 110.0, sequences=1)]
    records += [step(number, 10.0 * number + 100.0) for number in range(3, 3 + WARM_UP + STEPS + 5)]
    drawn = steady(records, 2, "title")
    assert [record.step for record in drawn.records] == list(
        range(3 + WARM_UP, 3 + WARM_UP + STEPS)
    )
    assert drawn.origin in [record.device_started for record in drawn.records]


def test_too_few_steps_with_all_streams_are_an_error() -> None:
    with pytest.raises(ClickException, match="all 3 streams at once in 0 steps"):
        steady([step(number, 10.0 * number) for number in range(1, 100)], 3, "title")


def test_what_is_in_view_first_is_neither_the_fastest_nor_the_slowest_stretch() -> None:
    lengths = [1.0] * 10 + [9.0] + [2.0] * 30 + [3.0] * 10
    records, now = [], 100.0
    for number, length in enumerate(lengths, 1):
        records.append(step(number, now, device_finished=now + length, committed=now + length))
        now += length
    at = typical(records, 5)
    assert records[at + 4].committed - records[at].device_started == pytest.approx(10.0)
    assert typical(records[:5], 5) == 0
