from __future__ import annotations

import io

import pytest
from rich.console import Console

from aiosched.commands.display import loading_bars, loading_lines


def test_lines_name_each_stage_once_with_its_size(capsys: pytest.CaptureFixture[str]) -> None:
    with loading_lines() as report:
        for done in (0, 50_000_000, 98_000_000):
            report("download", done, 98_000_000)
        report("unpack weights", 1, 272)
    assert capsys.readouterr().err == ("load libraries …\ndownload (98 MB) …\nunpack weights …\n")


def test_bars_count_megabytes_or_pieces() -> None:
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=100)
    with loading_bars(console) as report:
        report("download", 0, 98_000_000)
        report("download", 49_000_000, 98_000_000)
        report("unpack weights", 136, 272)
        report("move to device", 1, 1)
    shown = output.getvalue()
    for text in ("load libraries", "49/98 MB", "136/272", "move to device"):
        assert text in shown
    assert "1/1" not in shown


def test_a_stage_is_shown_as_it_is_named() -> None:
    output = io.StringIO()
    with loading_bars(Console(file=output, force_terminal=True, width=100)) as report:
        report("unpack [/x]", 1, 2)
    assert "unpack [/x]" in output.getvalue()
