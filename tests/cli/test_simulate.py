from __future__ import annotations

import json

import pytest
from simulations import calibration
from talking_model import Cli

from aiosched.simulate.router import ROUTERS
from aiosched.simulate.trace import read_trace

SMALL = (
    "--requests", "12", "--rate", "5", "--prompt-tokens", "8-32", "--output-tokens", "4"
)  # fmt: skip


@pytest.fixture
def given(tmp_path):
    """The option that names a calibration of round numbers."""
    calibration().write(tmp_path / "calibration.json")
    return "--calibration", str(tmp_path / "calibration.json")


def test_it_prints_a_table_with_a_column_for_each_router(cli: Cli, given) -> None:
    result = cli("simulate", "--generate", "poisson", *SMALL, *given, "--replicas", "2")
    assert result.exit_code == 0, result.stderr
    for text in (*ROUTERS, "first", "goodput", "queue", "12 requests", "a processor"):
        assert text in result.stdout


def test_as_json_it_is_one_object_with_a_row_for_each_router(cli: Cli, given) -> None:
    result = cli(
        "simulate", "--generate", "bursty", *SMALL, *given, "--json", "--overlap-depth", "2",
        "--router", "round-robin", "--router", "least-loaded", "--slo-ttft", "500",
    )  # fmt: skip
    report = json.loads(result.stdout)
    assert report["machine"]["cpu"] == "a processor"
    assert report["versions"] == {"python": "3"}
    assert report["settings"]["kind"] == "bursty"
    assert report["settings"]["engine"]["overlap_depth"] == 2
    assert [row["router"] for row in report["rows"]] == ["round-robin", "least-loaded"]
    for key in ("ttft_ms_p99", "tpot_ms_mean", "e2e_s_p50", "goodput", "output_tok_s",
                "utilisation", "queue_mean", "cached_share"):  # fmt: skip
        assert key in report["rows"][0]
    assert report["rows"][0]["slo_ttft_ms"] == 500


def test_a_generated_trace_is_written_and_can_be_read(cli: Cli, given, tmp_path) -> None:
    out = tmp_path / "trace.jsonl"
    result = cli("simulate", "--generate", "diurnal", *SMALL, "--prefixes", "2", "--out", str(out))
    assert (result.exit_code, result.stdout) == (0, "")
    assert len(read_trace(out)) == 12
    again = cli("simulate", str(out), *given, "--json")
    direct = cli("simulate", "--generate", "diurnal", *SMALL, "--prefixes", "2", *given, "--json")
    assert json.loads(again.stdout)["rows"] == json.loads(direct.stdout)["rows"]


def test_the_same_command_prints_the_same_bytes(cli: Cli, given) -> None:
    arguments = ("simulate", "--generate", "poisson", *SMALL, *given, "--json")
    assert cli(*arguments).stdout == cli(*arguments).stdout


def test_it_draws_a_plot(cli: Cli, given, tmp_path) -> None:
    plot = tmp_path / "plot.svg"
    cli("simulate", "--generate", "poisson", *SMALL, *given, "--plot", str(plot))
    assert plot.read_text().startswith("<svg")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "give a TRACE, or --generate one"),
        (("--generate", "weekly"), "weekly"),
        (("--generate", "poisson", "--rate", "0"), "rate"),
        (("--generate", "poisson", "--prompt-tokens", "many"), "LOW-HIGH"),
        (("--generate", "poisson", "--plot", "plot.png"), ".svg or .html"),
        (("--generate", "poisson", "--slo-ttft", "0"), "slo_ttft"),
        (("--generate", "poisson", "--policy", "lottery"), "policy"),
        (("--generate", "poisson", "--max-model-len", "5000"), "max_model_len"),
    ],
)
def test_wrong_use_is_refused_with_exit_code_2(cli: Cli, given, arguments, said) -> None:
    result = cli("simulate", *arguments, *given, "--requests", "3")
    assert result.exit_code == 2
    assert said in result.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--json",), "--json is for a simulation"),
        (("--replicas", "2"), "--replicas is for a simulation"),
        (("--kv-tokens", "64"), "--kv-tokens is for a simulation"),
        (("--swing", "0.5"), "--swing goes with --generate diurnal"),
        (("--burst-seconds", "1"), "--burst-seconds goes with --generate bursty"),
        (("--prefix-tokens", "-5"), "--prefix-tokens goes with --prefixes"),
    ],
)
def test_what_would_be_ignored_is_refused(cli: Cli, tmp_path, arguments, said) -> None:
    out = tmp_path / "trace.jsonl"
    result = cli("simulate", "--generate", "poisson", "--out", str(out), *arguments)
    assert (result.exit_code, out.exists()) == (2, False)
    assert said in result.stderr


@pytest.mark.parametrize("option", ["--plot", "--out"])
def test_a_folder_that_is_not_there_is_refused_at_the_start(cli: Cli, tmp_path, option) -> None:
    result = cli("simulate", "--generate", "poisson", option, str(tmp_path / "nope" / "x.svg"))
    assert result.exit_code == 2
    assert "there is no folder" in result.stderr


def test_a_bad_trace_is_wrong_use(cli: Cli, tmp_path) -> None:
    (tmp_path / "trace.jsonl").write_text("no json")
    result = cli("simulate", str(tmp_path / "trace.jsonl"))
    assert result.exit_code == 2
    assert "trace.jsonl, line 1" in result.stderr


@pytest.mark.parametrize("width", [160, 70, 40, 20])
def test_no_digit_is_lost_however_narrow_the_terminal(cli: Cli, given, monkeypatch, width) -> None:
    arguments = ("simulate", "--generate", "poisson", *SMALL, *given, "--router", "all")
    rows = json.loads(cli(*arguments, "--json").stdout)["rows"]
    monkeypatch.setenv("COLUMNS", str(width))
    shown = cli(*arguments).stdout
    for row in rows:
        assert row["router"] in shown
        assert f"{row['ttft_ms_p99']:,.1f}" in shown


def test_generator_options_need_a_generator(cli: Cli, tmp_path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"arrival": 1, "prompt_tokens": 3, "output_tokens": 1}\n')
    result = cli("simulate", str(trace), "--prefix-tokens", "3")
    assert result.exit_code == 2
    assert "--prefix-tokens goes with --generate" in result.stderr
