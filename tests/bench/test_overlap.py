"""``aiosched bench overlap``, at tiny size: that it runs, what it prints, and its arithmetic."""

from __future__ import annotations

import asyncio
import json

import pytest
from click.testing import CliRunner

from aiosched.bench import overlap
from aiosched.bench.busy_host import HostWork

KEYS = ["device_ms", "host_ms", "depth", "normal_ms", "overlap_ms", "ideal_ms", "ratio"]


@pytest.fixture
def short(monkeypatch):
    """No measuring of what aiosched takes itself: 150 steps."""

    async def own_ms():
        return 0.0

    monkeypatch.setattr(overlap, "own_ms", own_ms)


def invoke(*args):
    return CliRunner().invoke(overlap.command, args, catch_exceptions=False)


def test_the_command_prints_a_row_for_each_device_host_and_depth(short):
    result = invoke(
        *("--device", "0.2", "--device", "0.4", "--host", "0.1", "--depth", "1", "--depth", "2"),
        *("--steps", "4", "--rounds", "2", "--json"),
    )
    rows = json.loads(result.stdout)["rows"]
    assert [(row["device_ms"], row["depth"]) for row in rows] == [
        (0.2, 1), (0.2, 2), (0.4, 1), (0.4, 2)
    ]  # fmt: skip
    for row in rows:
        assert list(row)[: len(KEYS)] == KEYS
        assert row["ideal_ms"] == max(row["device_ms"], row["host_ms"])
        assert row["ratio"] == pytest.approx(row["overlap_ms"] / row["ideal_ms"])


def test_with_hiccups_a_row_says_how_long_the_device_was_idle_and_had_to_be(short):
    result = invoke("--device", "0.2", "--host", "0.1", "--hiccup", "1", "--steps", "50",
                    "--rounds", "1", "--json")  # fmt: skip
    (row,) = json.loads(result.stdout)["rows"]
    assert row["forced_ms"] == pytest.approx(0.9)
    assert row["idle_ms"] > 0


def test_runs_too_short_for_a_hiccup_are_refused(short):
    result = invoke("--hiccup", "20", "--steps", "100", "--rounds", "4")
    assert result.exit_code == 2
    assert "--hiccup needs runs of 50 steps" in result.stderr


def test_a_depth_is_a_number_from_1_or_auto():
    for wrong in ("0", "9", "deep"):
        assert invoke("--depth", wrong).exit_code == 2
    assert overlap.depths_of(None, None, ("auto", "2")) == ("auto", 2)


def test_what_a_hiccup_forces_is_what_the_steps_in_flight_do_not_cover():
    assert overlap.forced_ms(5.0, 21.0, 1) == 16.0
    assert overlap.forced_ms(5.0, 21.0, 2) == 11.0
    assert overlap.forced_ms(12.0, 21.0, 2) == 0.0
    assert overlap.forced_ms(5.0, 21.0, "auto") is None


def test_the_hosts_work_is_called_once_for_each_commit_at_every_depth():
    for depth in (0, 1, 2):
        work = HostWork()
        asyncio.run(overlap.run_loop(0.1, work, depth, steps=3))
        assert len(work.committed) == overlap.WARM_UP + 3 + 2
        assert work.committed == sorted(work.committed)
