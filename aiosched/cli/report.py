"""What the demo measured, for people and for programs."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from typing import Self

import click
import msgspec
from rich.console import Console
from rich.table import Table

from aiosched.cli.compare import Medians, Run, fixed_depth, same_tokens
from aiosched.config import EngineConfig
from aiosched.runtime import device_kind


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The comparison of the two loops, with all that is needed to repeat it.

    Attributes:
        identical: whether every run at every depth gave the same tokens.
        verdict: what the medians say, in a sentence or two.
        runs: every single run, in the order of each depth.
    """

    model: str
    device: str
    dtype: str
    machine: str
    cores: int
    prompts: int
    rounds: int
    normal: Medians
    overlap: Medians
    identical: bool
    verdict: str
    runs: Sequence[Run]

    @classmethod
    def of(cls, config: EngineConfig, runs: Mapping[int, list[Run]]) -> Self:
        """``config`` is that of the overlap engine; ``runs`` are by depth, with depth 0."""
        normal, overlap = runs[0], runs[fixed_depth(config)]
        medians = Medians.of(normal), Medians.of(overlap)
        device, cores = device_kind(config.device), _cores()
        return cls(
            model=config.model,
            device=device,
            dtype=config.dtype,
            machine=f"{platform.system()} {platform.machine()}",
            cores=cores,
            prompts=len(normal[0].token_ids),
            rounds=len(normal),
            normal=medians[0],
            overlap=medians[1],
            identical=same_tokens(runs),
            verdict=verdict(*medians, cores=cores if device == "cpu" else None),
            runs=[*normal, *overlap],
        )

    def show(self, console: Console | None = None) -> None:
        """Print a table and the verdict."""
        click.echo(
            f"\n{self.model} in {self.dtype} on {self.device} ({self.machine}, {self.cores} "
            f"cores), {self.prompts} prompts at once, medians of {self.rounds}:"
        )
        table = Table()
        table.add_column("ms a step")
        table.add_column("normal loop", justify="right")
        table.add_column(f"overlap, depth {self.overlap.depth}", justify="right")
        for label, field in _ROWS:
            pair = (getattr(medians, field) for medians in (self.normal, self.overlap))
            table.add_row(label, *(f"{value:.2f}" for value in pair))
        table.add_section()
        pair = (medians.tokens_per_second for medians in (self.normal, self.overlap))
        table.add_row("tokens a second", *(f"{value:.1f}" for value in pair))
        (console or Console()).print(table)
        click.echo(self.verdict)
        if self.identical:
            click.echo("Both loops gave the same tokens in every run.")
        else:
            click.echo("The tokens were NOT the same in all runs.")


_ROWS = (
    ("step (wall clock)", "step_ms"),
    ("device works", "device_ms"),
    ("host works", "host_ms"),
    ("device idle between steps", "idle_gap_ms"),
)


def verdict(normal: Medians, overlap: Medians, *, cores: int | None) -> str:
    """What the medians say about the step time, and no more.

    A difference counts only if the slowest run of one loop beat the fastest of the other.

    ``cores``: of the CPU that is the device and the host in one; ``None``: the device is another.
    """
    change = overlap.step_ms / normal.step_ms - 1
    if normal.runs == 1:
        found = f"{change:+.1%}, but one run of each says nothing about the spread (--rounds)"
    elif overlap.step_ms_high < normal.step_ms_low or normal.step_ms_high < overlap.step_ms_low:
        found = f"overlap was {abs(change):.1%} {'faster' if change < 0 else 'slower'}"
    else:
        found = f"{change:+.1%}, which is within the spread of these runs"
    sentences = [
        f"A step took {overlap.step_ms:.2f} ms with overlap and {normal.step_ms:.2f} ms without: "
        f"{found}."
    ]
    at_most = normal.host_ms + normal.idle_gap_ms
    if normal.step_ms - overlap.step_ms > at_most:
        sentences.append(
            f"That is more than the {at_most:.2f} ms of host and idle time that overlap could "
            "hide: something else on this machine changed between the runs."
        )
    else:
        sentences.append(
            f"Overlap hides the host's work, {normal.host_ms:.2f} ms of a step, behind the "
            "device's."
        )
    if cores is not None:
        sentences.append(
            f"The device is this machine's own CPU: device and host share {cores} cores, so host "
            "work that is hidden behind a forward also slows it."
        )
    return "\n".join(sentences)


def _cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
