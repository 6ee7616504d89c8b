"""A benchmark's report, as a table and as one object."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from aiosched.bench.report import Report, print_rows, table_of


def test_as_json_it_is_one_object_with_machine_versions_and_rows(capsys):
    Report.of("x", [{"batch": 1, "us": 2.5}], settings={"rounds": 3}, notes=["n"]).show(True)
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    report = json.loads(out)
    assert report["rows"] == [{"batch": 1, "us": 2.5}]
    assert report["machine"]["cores"] >= 1
    assert report["versions"]["aiosched"]
    assert report["settings"] == {"rounds": 3}


def test_as_a_table_it_names_the_machine_and_shows_the_notes(capsys):
    Report.of("x", [{"batch": 1}], settings={}, notes=["Mind the gap."]).show(False)
    out = capsys.readouterr().out
    assert "aiosched bench x on " in out
    assert "Mind the gap." in out


def test_a_table_has_a_column_for_every_key_and_a_dash_where_a_row_has_none():
    rows = [{"name": "a", "ms": 0.01234}, {"name": "b", "other": 1234.5}]
    out = io.StringIO()
    Console(width=80, file=out).print(table_of(rows))
    text = out.getvalue()
    for part in ("name", "ms", "other", "0.0123", "1,234", "–"):
        assert part in text


@pytest.mark.parametrize("width", [160, 60, 40, 20, 4])
def test_no_digit_is_lost_however_narrow_the_console_is(width):
    rows = [{"what it is": f"a name of {n}", "tok/s": 1833.25 * n, "ms": 0.123} for n in (1, 700)]
    out = io.StringIO()
    print_rows(rows, Console(width=width, file=out))
    for figure in ("1,833", "1,283,275", "0.123"):
        assert figure in out.getvalue()


@pytest.mark.parametrize("text", ["[/x]", "[red]", "a[bold]b", ":smile:", "end\\"])
def test_a_table_shows_a_heading_and_a_cell_as_they_are(text):
    out = io.StringIO()
    Console(width=80, file=out).print(table_of([{text: text}]))
    assert out.getvalue().count(text) == 2
