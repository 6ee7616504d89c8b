"""What ``aiosched simulate`` prints: a table for people, or one JSON object for programs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from aiosched.simulate.cost import Calibration

TITLE_WIDTH = 12
"""Columns, at least, of what a figure is of: it may be broken, the figures may not."""


class SimulationReport(msgspec.Struct, frozen=True, kw_only=True):
    """The runs of one command.

    Attributes:
        machine, versions: of the calibration: where the figures would be true.
        rows: see ``metrics.summary``, one for each router.
    """

    machine: Mapping[str, Any]
    versions: Mapping[str, str]
    settings: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]]

    @classmethod
    def of(
        cls,
        calibration: Calibration,
        settings: Mapping[str, Any],
        rows: Sequence[Mapping[str, Any]],
    ) -> SimulationReport:
        """A report on the machine that was measured."""
        where = {"model": calibration.model, "dtype": calibration.dtype}
        return cls(
            machine=calibration.machine,
            versions=calibration.versions,
            settings=where | dict(settings),
            rows=rows,
        )

    def show(self, as_json: bool, console: Console | None = None) -> None:
        """Print it to standard output."""
        if as_json:
            click.echo(msgspec.json.encode(self))
            return
        first, cpu = self.rows[0], self.machine.get("cpu", "a machine without a name")
        click.echo(
            f"{first['requests']:,} requests in {first['seconds']:,.1f} virtual seconds, replicas: "
            f"{first['replicas']}; {self.settings['model']} in {self.settings['dtype']} "
            f"as on {self.machine.get('gpu') or cpu}"
        )
        console = console or Console()
        together = _table(self.rows)
        if _fits(together, console):
            console.print(together)
            return
        for row in self.rows:
            alone = _table([row])
            if _fits(alone, console):
                console.print(alone)
            else:
                _list(row)


def _fits(table: Table, console: Console) -> bool:
    """Whether it can be shown whole: rich cuts digits off a table that is too wide."""
    unbounded = console.options.update(width=10_000)
    return Measurement.get(console, unbounded, table).minimum <= console.width


def _list(row: Mapping[str, Any]) -> None:
    """The same as lines, which a terminal may break where it likes."""
    click.echo(f"\n{row['router']}")
    for title, name, cell in _cells(row):
        click.echo(f"{title}, {name}: {cell}")


def _table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """A column for each run: there are more figures than runs."""
    table = Table()
    table.add_column("", min_width=TITLE_WIDTH)
    table.add_column("", no_wrap=True)
    for row in rows:
        table.add_column(Text(str(row["router"])), justify="right", no_wrap=True)
    before = ""
    for lines in zip(*(_cells(row) for row in rows), strict=True):
        title, name, _ = lines[0]
        if title != before:
            table.add_section()
        table.add_row("" if title == before else title, name, *(cell for _, _, cell in lines))
        before = title
    return table


def _cells(row: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """What a figure is of, its name with its unit, and the figure."""
    for title, unit, keys, form in _LINES:
        for name, key in keys.items():
            cell = "–" if row[key] is None else form.format(row[key])
            yield title, f"{name} {unit}".strip(), cell


def _spread(key: str) -> dict[str, str]:
    return {name: f"{key}_{name}" for name in ("mean", "p50", "p90", "p99")}


_LINES: tuple[tuple[str, str, dict[str, str], str], ...] = (
    ("time to first token", "ms", _spread("ttft_ms"), "{:,.1f}"),
    ("time per output token", "ms", _spread("tpot_ms"), "{:,.2f}"),
    ("end to end", "s", _spread("e2e_s"), "{:,.2f}"),
    ("goodput", "", {"requests/s": "goodput"}, "{:,.3f}"),
    ("within the SLO", "", {"of requests": "slo_share"}, "{:.1%}"),
    ("throughput", "", {"requests/s": "throughput"}, "{:,.3f}"),
    ("throughput", "", {"output tokens/s": "output_tok_s"}, "{:,.1f}"),
    ("devices busy", "", {"of the time": "utilisation"}, "{:.1%}"),
    ("queue", "requests", {"mean": "queue_mean", "most": "queue_max"}, "{:,.2f}"),
    ("queue", "s", {"mean wait": "queue_s"}, "{:,.3f}"),
    ("prompts", "", {"of tokens cached": "cached_share"}, "{:.1%}"),
    ("requests", "", {"failed": "failed", "retracted": "retractions"}, "{:,}"),
)
