"""What ``aiosched simulate`` prints: a table for people, or one JSON object for programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from aiosched.simulate.cost import Calibration


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
        (console or Console()).print(_table(self.rows))


def _table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """A column for each run: there are more figures than runs."""
    table = Table()
    table.add_column("")
    table.add_column("")
    for row in rows:
        table.add_column(Text(str(row["router"])), justify="right")
    for title, unit, keys, form in _LINES:
        for name, key in keys.items():
            cells = ("–" if row[key] is None else form.format(row[key]) for row in rows)
            table.add_row(title, f"{name} {unit}".strip(), *cells)
            title = ""
        table.add_section()
    return table


def _spread(key: str) -> dict[str, str]:
    return {name: f"{key}_{name}" for name in ("mean", "p50", "p90", "p99")}


_LINES: tuple[tuple[str, str, dict[str, str], str], ...] = (
    ("time to first token", "ms", _spread("ttft_ms"), "{:,.1f}"),
    ("time per output token", "ms", _spread("tpot_ms"), "{:,.2f}"),
    ("end to end", "s", _spread("e2e_s"), "{:,.2f}"),
    ("goodput", "", {"requests/s": "goodput"}, "{:,.3f}"),
    ("within the SLO", "", {"of requests": "slo_share"}, "{:.1%}"),
    ("throughput", "", {"requests/s": "throughput"}, "{:,.3f}"),
    ("", "", {"output tokens/s": "output_tok_s"}, "{:,.1f}"),
    ("devices busy", "", {"of the time": "utilisation"}, "{:.1%}"),
    ("queue", "requests", {"mean": "queue_mean", "most": "queue_max"}, "{:,.2f}"),
    ("", "s", {"mean wait": "queue_s"}, "{:,.3f}"),
    ("prompts", "", {"of tokens cached": "cached_share"}, "{:.1%}"),
    ("requests", "", {"failed": "failed", "retracted": "retractions"}, "{:,}"),
)
