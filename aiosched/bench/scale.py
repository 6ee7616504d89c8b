"""``aiosched bench scale``: thousands of streams at once on the simulated device.

Each number of streams is run twice: against the clock, and weighed (with ``tracemalloc``, which
slows everything down). Half of the streams are read to their end, the other half are left by their
readers in the middle; after that nothing may be there any more.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from aiosched.bench.crowd import Crowd, Left
from aiosched.bench.measure import Spread, watching_others
from aiosched.bench.report import Report
from aiosched.commands.running import run

STREAMS = (100, 1_000, 10_000)

NOTES = (
    "submit_us: a call of generate. admit_us: intake and plan until all run, a request."
    " us_per_step, us_per_stream: all of the event loop's thread, all streams being read.",
    "kb_per_stream: what a running stream with its task takes; kb_per_place: what the engine takes"
    " in advance for each place.",
    "left_*: after all have ended or were left: pages, rows, tasks, requests and streams that are"
    " still there; left_kb after the engine was closed, with what Python keeps to itself (its set"
    " of tasks does not shrink).",
)


@click.command("scale", short_help="Thousands of streams at once.")
@click.option("--streams", type=click.IntRange(2, 65536), multiple=True, default=STREAMS,
              show_default=True, help="How many at once. May be given several times.")  # fmt: skip
@click.option("--depth", type=click.IntRange(0, 8), default=1, show_default=True,
              help="Depth of the overlap; 0 is the normal loop.")  # fmt: skip
@click.option("--steps", type=click.IntRange(1), default=16, show_default=True,
              help="Steps of one measurement, of which there are three.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(streams: tuple[int, ...], depth: int, steps: int, as_json: bool) -> None:
    """Thousands of streams at once on the simulated device: memory, time, and what is left.

    A task of its own reads each stream. Times are CPU time of the event loop's thread.
    """
    with watching_others() as others:
        rows = [measure(count, depth, steps) for count in streams]
    notes = list(NOTES)
    if not others.quiet:
        notes.append(f"Others used {others.cores:.2f} cores meanwhile: measure again.")
    settings = {"streams": streams, "depth": depth, "steps": steps}
    Report.of("scale", rows, settings=settings, notes=notes).show(as_json)


def measure(streams: int, depth: int, steps: int) -> Mapping[str, Any]:
    """One row of the table."""
    timed = Crowd(streams, depth=depth, steps=steps)
    left = run(timed.run())
    weighed = Crowd(streams, depth=depth, steps=1, weigh=True)
    left_weighed = run(weighed.run())
    step = 1e6 * Spread.of(timed.step_seconds).median
    return {
        "streams": streams,
        "submit_us": 1e6 * timed.submit_seconds / streams,
        "admit_us": 1e6 * timed.admit_seconds / streams,
        "us_per_step": step,
        "us_per_stream": step / streams,
        "kb_per_stream": weighed.stream_bytes / 1024 / streams,
        "kb_per_place": weighed.engine_bytes / 1024 / streams,
        **Left.worst(left, left_weighed).as_columns(),
    }
