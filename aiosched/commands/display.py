"""What is shown while a model loads. Everything goes to standard error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn
from rich.text import Text

if TYPE_CHECKING:
    from aiosched.model.progress import Progress as Report

BYTES_FROM = 1 << 20
"""Totals from here on are bytes: models have fewer pieces, and files are larger."""

_FIRST = "load libraries"  # torch takes seconds to import, before the loader can say anything


@contextmanager
def loading_bars(console: Console | None = None) -> Iterator[Report]:
    """A bar for each stage, gone when the block ends. Yields what an engine calls as progress."""
    columns = TextColumn("{task.description:<16}", markup=False), BarColumn(), _Amount()
    with Progress(*columns, console=console or Console(stderr=True), transient=True) as bars:
        lock = Lock()
        tasks: dict[str, TaskID] = {_FIRST: bars.add_task(_FIRST, total=None)}

        def report(stage: str, done: int, total: int) -> None:
            with lock:
                if stage not in tasks:
                    bars.update(tasks[_FIRST], total=1, completed=1)
                    tasks[stage] = bars.add_task(stage, total=None)
                # Without a total the bar moves to and fro: not every stage counts as it goes.
                bars.update(tasks[stage], completed=done, total=total if done and total else None)

        yield report


@contextmanager
def loading_lines() -> Iterator[Report]:
    """A line for each stage as it begins, for a log or a pipe."""
    seen: set[str] = set()

    def report(stage: str, done: int, total: int) -> None:
        if stage not in seen:
            seen.add(stage)
            size = f" ({total / 1e6:.0f} MB)" if total >= BYTES_FROM else ""
            click.echo(f"{stage}{size} …", err=True)

    report(_FIRST, 0, 0)
    yield report


class _Amount(ProgressColumn):
    """How much is done, in MB or in pieces."""

    def render(self, task: Task) -> Text:
        if not task.total or task.total == 1:
            return Text()
        if task.total >= BYTES_FROM:
            return Text(f"{task.completed / 1e6:.0f}/{task.total / 1e6:.0f} MB")
        return Text(f"{task.completed:.0f}/{task.total:.0f}")
