from __future__ import annotations

import io
import json

import pytest
from rich.console import Console
from talking_model import Cli, Letters, TalkingModel

from aiosched import FinishReason, Token
from aiosched.cli.board import LiveBoard
from aiosched.cli.compare import Medians, Run, same_tokens
from aiosched.cli.demo import QUESTIONS, demo_config
from aiosched.cli.report import verdict
from aiosched.config import EngineConfig
from aiosched.testing.hash_model import oracle

FAST = ("--max-tokens", "5", "--rounds", "2", "--device", "cpu")


def one_run(depth: int, seconds: float = 1.0, tokens: tuple[int, ...] = (1,)) -> Run:
    return Run(
        depth=depth,
        seconds=seconds,
        steps=10,
        tokens=20,
        device_seconds=0.5,
        host_seconds=0.25,
        idle_gap_seconds=0.125,
        token_ids=(tokens,),
    )


def medians(depth: int, *seconds: float) -> Medians:
    return Medians.of([one_run(depth, each) for each in seconds])


def test_the_demo_answers_all_questions_and_reports_both_loops(cli: Cli) -> None:
    result = cli("demo", *FAST)
    assert result.exit_code == 0, result.stderr
    assert all(question in result.stdout for question in QUESTIONS)
    assert f"[{len(QUESTIONS)}/{len(QUESTIONS)}]" in result.stdout
    assert result.stdout.count("steps in") == 4
    for row in (
        "step (wall clock)",
        "device works",
        "host works",
        "device idle",
        "tokens a second",
    ):
        assert row in result.stdout
    assert "Both loops gave the same tokens in every run." in result.stdout


def test_the_json_report_holds_every_run_and_the_oracles_tokens(cli: Cli) -> None:
    result = cli("demo", "--json", "--depth", "2", *FAST)
    assert result.stderr == ""
    report = json.loads(result.stdout)
    assert (report["prompts"], report["rounds"], report["dtype"]) == (8, 2, "float32")
    assert report["identical"] is True
    assert [run["depth"] for run in report["runs"]] == [0, 0, 2, 2]
    letters = Letters()
    expected = [oracle(letters.encode(f"user:{question}|"), 5) for question in QUESTIONS]
    for run in report["runs"]:
        assert run["token_ids"] == expected
        assert run["tokens"] == 5 * len(QUESTIONS)
        # A step for the prompts, then one for each further token.
        assert run["steps"] >= 5
        assert run["seconds"] > run["device_seconds"] > 0 < run["host_seconds"]


def test_the_comparison_caches_no_prefix_and_is_in_float32_unless_told() -> None:
    config = demo_config(EngineConfig(), max_tokens=64)
    assert (config.prefix_cache, config.dtype, config.kv_tokens) == (False, "float32", 8 * 320)
    told = demo_config(EngineConfig(dtype="bfloat16", kv_tokens=100), max_tokens=64)
    assert (told.dtype, told.kv_tokens) == ("bfloat16", 100)


def test_a_plain_model_gets_the_questions_as_they_are(cli: Cli) -> None:
    result = cli("demo", *FAST, "--json", model=TalkingModel(chat_template=None))
    first = json.loads(result.stdout)["runs"][0]["token_ids"][0]
    assert first == oracle(Letters().encode(QUESTIONS[0]), 5)


def test_medians_are_per_step() -> None:
    found = medians(1, 3.0, 1.0, 2.0)
    assert (found.step_ms, found.step_ms_low, found.step_ms_high) == (200.0, 100.0, 300.0)
    assert (found.device_ms, found.host_ms, found.idle_gap_ms) == (50.0, 25.0, 12.5)
    assert (found.tokens_per_second, found.runs) == (10.0, 3)


@pytest.mark.parametrize(
    ("normal", "overlap", "said"),
    [
        ([1.0, 1.01], [0.98, 0.99], "overlap was 2.0% faster."),
        ([1.0, 1.1], [2.0, 2.2], "overlap was 100.0% slower."),
        ([1.0, 2.0], [1.9, 1.9], "+26.7%, which is within the spread of these runs."),
        ([2.0], [1.0], "-50.0%, but one run of each says nothing about the spread (--rounds)."),
    ],
)
def test_a_difference_is_claimed_only_beyond_the_spread_of_the_runs(
    normal: list[float], overlap: list[float], said: str
) -> None:
    text = verdict(medians(0, *normal), medians(1, *overlap), cores=None)
    assert said in text
    assert "share" not in text


def test_a_gain_beyond_what_overlap_can_hide_is_put_down_to_something_else() -> None:
    # Each step has 25 ms of host work and 12.5 ms of idle time.
    text = verdict(medians(0, 1.0, 1.01), medians(1, 0.96, 0.97), cores=None)
    assert "more than" not in text
    text = verdict(medians(0, 1.0, 1.01), medians(1, 0.61, 0.62), cores=None)
    assert "more than the 37.50 ms of host and idle time" in text


def test_on_a_cpu_the_verdict_says_that_device_and_host_share_cores() -> None:
    text = verdict(medians(0, 1.0, 1.1), medians(1, 2.0, 2.1), cores=2)
    assert "overlap was 95.2% slower" in text
    assert "device and host share 2 cores" in text


def test_other_tokens_in_any_run_are_noticed() -> None:
    runs = {0: [one_run(0), one_run(0)], 1: [one_run(1)]}
    assert same_tokens(runs)
    assert not same_tokens(runs | {1: [one_run(1), one_run(1, tokens=(2,))]})


def test_the_live_board_shows_the_end_of_each_answer_beside_its_question() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100, height=30)
    board = LiveBoard(["First?", "Second [bold]?"], 8, console)
    words = [f"word{i} " for i in range(200)]
    for index, word in enumerate(words):
        board.token(0, Token(id=1, text=word, index=index))
    board.token(1, Token(id=1, text="[red]", index=0, finish_reason=FinishReason.STOP))
    with console.capture() as captured:
        console.print(board.render())
    shown = captured.get()
    for text in ("First?", "Second [bold]?", "word199", "[red]", "200 tok", "1 tok in"):
        assert text in shown
    assert "word0 " not in shown
