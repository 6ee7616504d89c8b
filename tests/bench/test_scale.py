"""``aiosched bench scale``, at tiny size: that it runs, what it prints, and what it finds."""

from __future__ import annotations

import asyncio
import json

import pytest
from click.testing import CliRunner

from aiosched.bench import crowd, scale
from aiosched.bench.crowd import Crowd, Left

LEFT = ("left_pages", "left_rows", "left_tasks", "left_objects")


def test_the_command_prints_a_row_for_each_number_of_streams_and_nothing_is_left():
    args = ["--streams", "2", "--streams", "5", "--steps", "1", "--json"]
    result = CliRunner().invoke(scale.command, args, catch_exceptions=False)
    rows = json.loads(result.stdout)["rows"]
    assert [row["streams"] for row in rows] == [2, 5]
    for row in rows:
        assert row["submit_us"] > 0
        assert row["admit_us"] > 0
        assert row["us_per_stream"] == pytest.approx(row["us_per_step"] / row["streams"])
        assert row["kb_per_stream"] > 0
        assert [row[column] for column in LEFT] == [0, 0, 0, 0]


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_crowd_leaves_nothing_at_any_depth(depth):
    left = asyncio.run(Crowd(4, depth=depth, steps=1).run())
    assert left == Left(pages=0, rows=0, tasks=0, objects=0, size=None)


def test_a_stream_that_somebody_keeps_is_found(monkeypatch):
    kept = []
    read = Crowd._read

    async def keeping(self, stream, to_the_end):
        kept.append(stream)
        await read(self, stream, to_the_end=True)

    monkeypatch.setattr(crowd.Crowd, "_read", keeping)
    left = asyncio.run(Crowd(2, depth=1, steps=1).run())
    assert left.objects == 6  # two streams, each with its answer and its request
    assert (left.pages, left.rows, left.tasks) == (0, 0, 0)
