"""Boards: several answers at once, as they stream."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from types import TracebackType
from typing import Protocol, Self

import click
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from aiosched.request import Token


class Board(Protocol):
    """A context manager that is told every token. ``index`` counts the questions from 0."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...

    def token(self, index: int, token: Token) -> None: ...


class _Answer:
    """What is known of one answer."""

    def __init__(self) -> None:
        self.text = ""
        self.tokens = 0
        self.first: float | None = None  # seconds from the submission
        self.end: float | None = None

    def add(self, token: Token, now: float) -> None:
        self.text += token.text
        self.tokens += token.id is not None
        self.first = now if self.first is None else self.first
        if token.finish_reason is not None:
            self.end = now


class SilentBoard:
    """Shows nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        return

    def token(self, index: int, token: Token) -> None:
        return


class LineBoard(SilentBoard):
    """Writes each answer in one piece when it has ended, for logs and pipes."""

    def __init__(self, questions: Sequence[str]) -> None:
        self._questions = questions
        self._answers = [_Answer() for _ in questions]
        self._began = perf_counter()

    def token(self, index: int, token: Token) -> None:
        answer = self._answers[index]
        answer.add(token, perf_counter() - self._began)
        if answer.end is not None:
            ended = sum(other.end is not None for other in self._answers)
            click.echo(
                f"[{ended}/{len(self._answers)}] {self._questions[index]}\n"
                f"      {' '.join(answer.text.split())}\n"
                f"      {answer.tokens} tokens, the first after {answer.first:.2f} s, "
                f"the last after {answer.end:.2f} s"
            )


class LiveBoard:
    """Panels side by side on a terminal, each with the end of its answer and a progress bar."""

    COLUMNS = 2

    def __init__(self, questions: Sequence[str], max_tokens: int, console: Console) -> None:
        self._questions = questions
        self._answers = [_Answer() for _ in questions]
        self._max_tokens = max_tokens
        self._console = console
        self._began = perf_counter()
        self._live = Live(
            console=console, get_renderable=self.render, refresh_per_second=10, transient=False
        )

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._live.stop()

    def token(self, index: int, token: Token) -> None:
        self._answers[index].add(token, perf_counter() - self._began)

    def render(self) -> RenderableType:
        columns = self.COLUMNS if self._console.width >= 80 else 1
        rows = -(-len(self._questions) // columns)
        width = self._console.width // columns
        height = max(4, min(9, (self._console.height - 1) // rows))
        grid = Table.grid(expand=True)
        for _ in range(columns):
            grid.add_column(width=width)
        panels = [self._panel(i, width - 4, height) for i in range(len(self._questions))]
        for row in range(rows):
            grid.add_row(*panels[row * columns : (row + 1) * columns])
        return grid

    def _panel(self, index: int, width: int, height: int) -> Panel:
        answer = self._answers[index]
        lines = Text(answer.text).wrap(self._console, width)
        shown = Text("\n").join(lines[-(height - 3) :])
        shown.append("\n" * max(0, height - 4 - shown.plain.count("\n")))
        ended = answer.end is not None
        bar = ProgressBar(
            total=self._max_tokens,
            completed=self._max_tokens if ended else answer.tokens,
            complete_style="cyan",
            finished_style="green",
        )
        return Panel(
            Group(shown, bar),
            title=Text(self._questions[index], overflow="ellipsis", no_wrap=True),
            title_align="left",
            subtitle=f"{answer.tokens} tok" + (f" in {answer.end:.1f} s" if ended else ""),
            subtitle_align="right",
            border_style="green" if ended else "cyan" if answer.tokens else "dim",
            height=height,
        )
