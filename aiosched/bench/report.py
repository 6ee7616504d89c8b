"""What a benchmark prints: a table for people, or one JSON object for programs."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

PACKAGES = ("torch", "transformers", "tokenizers", "numpy", "uvloop", "flashinfer-python")

WIDTH = 160
"""Columns of a table that does not go to a terminal."""


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Where a benchmark ran.

    Attributes:
        cores: that this process may use.
        memory_gb: of the machine, in GiB; ``None`` where the system does not say.
    """

    system: str
    cpu: str
    cores: int
    memory_gb: float | None
    gpu: str | None = None


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """One benchmark's outcome.

    Attributes:
        benchmark: the name behind ``aiosched bench``.
        settings: what was asked for: all that is needed to repeat the run.
        rows: one mapping a row; the keys are those that the benchmark documents.
        notes: sentences that a reader of the numbers needs.
    """

    benchmark: str
    machine: Machine
    versions: Mapping[str, str]
    settings: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]]
    notes: Sequence[str] = ()

    @classmethod
    def of(
        cls,
        benchmark: str,
        rows: Sequence[Mapping[str, Any]],
        *,
        settings: Mapping[str, Any],
        notes: Sequence[str] = (),
        gpu: str | None = None,
    ) -> Report:
        """A report from this machine."""
        return cls(
            benchmark=benchmark,
            machine=this_machine(gpu),
            versions=versions(),
            settings=settings,
            rows=rows,
            notes=notes,
        )

    def show(self, as_json: bool, console: Console | None = None) -> None:
        """Print it to standard output: one JSON object on one line, or a table with its notes."""
        if as_json:
            click.echo(msgspec.json.encode(self))
            return
        machine = self.machine
        where = f"{machine.cpu}, {machine.cores} cores, {machine.system}"
        title = f"aiosched bench {self.benchmark} on {machine.gpu or where}"
        click.echo(f"{title} (torch {self.versions.get('torch', 'absent')})")
        if console is None:  # a file or a pipe has no width that a table must fit
            console = Console(width=None if sys.stdout.isatty() else WIDTH)
        print_rows(self.rows, console)
        for note in self.notes:
            click.echo(note)


def print_rows(rows: Sequence[Mapping[str, Any]], console: Console) -> None:
    """Print ``table_of(rows)``, or what stands in it line by line if the console is too narrow.

    Rich would fit the table in by cutting digits off.
    """
    table = table_of(rows)
    unbounded = console.options.update(width=10_000)
    if Measurement.get(console, unbounded, table).minimum <= console.width:
        console.print(table)
        return
    for row in rows:
        lines = "\n".join(f"{key}: {_cell(value)}" for key, value in row.items())
        console.print(Text(f"{lines}\n", overflow="fold"), soft_wrap=True)


def table_of(rows: Sequence[Mapping[str, Any]]) -> Table:
    """A table of mappings: a column for each key, in the order in which keys first appear.

    Keys and values are shown as they are: square brackets in them are no markup.
    """
    table = Table()
    columns = list(dict.fromkeys(key for row in rows for key in row))
    for column in columns:
        texts = any(isinstance(row.get(column), str) for row in rows)
        table.add_column(
            Text(column), justify="left" if texts else "right", no_wrap=not texts, overflow="fold"
        )
    for row in rows:
        table.add_row(*(Text(_cell(row.get(column))) for column in columns))
    return table


def this_machine(gpu: str | None = None) -> Machine:
    """The machine that this process runs on."""
    return Machine(
        system=f"{platform.system()} {platform.machine()}",
        cpu=_cpu_name(),
        cores=_cores(),
        memory_gb=_memory_gb(),
        gpu=gpu,
    )


def versions() -> dict[str, str]:
    """Versions of Python, aiosched and the packages that make the numbers."""
    from aiosched import __version__

    found = {"python": platform.python_version(), "aiosched": __version__}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool) or not isinstance(value, float):
        return str(value)
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.2f}" if abs(value) >= 1 else f"{value:.3g}"


def _cpu_name() -> str:
    if sys.platform == "linux":
        try:
            lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        except OSError:
            lines = []
        for line in lines:
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _memory_gb() -> float | None:
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None
    return round(total / 2**30, 1)
