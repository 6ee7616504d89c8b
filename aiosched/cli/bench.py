"""``aiosched bench``: the published claims, each as a command."""

from __future__ import annotations

from importlib import import_module

import click

BENCHMARKS = {
    "calibrate": "Fit the cost model of `aiosched simulate` on this machine.",
    "gpu": "Step time, idle gap and wake-up latency on one GPU.",
    "host": "What the host does in a step, part by part, at batch 1 to 4096.",
    "lag": "Lag of the event loop while it serves 32 streams and an 800 KB prompt.",
    "offline": "Tokens a second on a real model, beside other engines.",
    "overlap": "The overlap loop against max(device, host), on a simulated device.",
    "scale": "10,000 streams at once: memory, time a step, what is left afterwards.",
}
"""Name and first line of help: a benchmark's module is imported when it is called for."""


class Benchmarks(click.Group):
    """The modules of ``aiosched.bench``, each with a click command ``command``."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(BENCHMARKS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in BENCHMARKS:
            return None
        command = import_module(f"aiosched.bench.{cmd_name}").command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Benchmarks"):
            formatter.write_dl(sorted(BENCHMARKS.items()))


@click.group(cls=Benchmarks, short_help="Measure what the project claims.")
def bench() -> None:
    """Measure what the project claims, on your machine.

    Each benchmark prints a table, or with --json one object with the keys machine, versions,
    settings, rows and notes. Run one at a time, on a machine that does nothing else.
    """
