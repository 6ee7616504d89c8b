"""``aiosched bench overlap``: the overlap loop against max(device, host).

The device is simulated, in real time: a forward takes as long as it is told. The host's work on a
step, aiosched's own included, is filled up to what is asked for with a busy loop at commit. Then
the normal loop should take device + host a step, and the overlap loop the longer of the two.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import Any

import click
import msgspec

from aiosched.bench.busy_host import BusyHostDevice, HostWork
from aiosched.bench.measure import Spread, alternate, watching_others
from aiosched.bench.null_device import CannedResults, NullModel
from aiosched.bench.report import Report
from aiosched.commands.running import run
from aiosched.engine import Engine
from aiosched.params import SamplingParams
from aiosched.stream import TokenStream

DEVICE_MS = (2.0, 5.0, 8.0, 12.0)
HOST_MS = (0.5, 1.0, 2.0)
STREAMS = 8
VOCAB = 1024
WARM_UP = 10  # steps
HICCUP_EVERY = 50  # steps

NOTES = (
    "host_ms is all that the host does in a step: what aiosched itself takes of it (own_ms,"
    " measured first: the normal loop's step less the device's time) is filled up by a busy loop.",
    "ideal_ms is the longer of device and host; ratio is overlap_ms / ideal_ms.",
)
HICCUP_NOTE = (
    f"At every {HICCUP_EVERY}th step the host is held up. forced_ms: how long the device must be"
    " idle then, for the steps in flight last no longer; idle_ms: how long it was idle for each."
)


class Loop(msgspec.Struct, frozen=True):
    """What one run of a loop took, in milliseconds: a step, and the device's idle time in all."""

    step: float
    idle: float


def depths_of(_ctx: object, _param: object, given: Sequence[str]) -> tuple[int | str, ...]:
    """The depths that were given, as settings of an engine: 1 to 8, or ``auto``."""
    for depth in given:
        if depth != "auto" and depth not in map(str, range(1, 9)):
            raise click.BadParameter(f"{depth!r} is neither a number from 1 to 8 nor auto")
    return tuple(depth if depth == "auto" else int(depth) for depth in given)


@click.command("overlap", short_help="The overlap loop against max(device, host).")
@click.option("--device", "devices", type=click.FloatRange(0.1), multiple=True, metavar="MS",
              default=DEVICE_MS, show_default=True,
              help="What a forward takes. May be given several times.")  # fmt: skip
@click.option("--host", "hosts", type=click.FloatRange(0.0), multiple=True, metavar="MS",
              default=HOST_MS, show_default=True,
              help="What the host takes for a step. Also several times.")  # fmt: skip
@click.option("--depth", "depths", multiple=True, metavar="1-8|auto", callback=depths_of,
              default=("1",), show_default=True,
              help="Of the overlap loop. Also several times.")  # fmt: skip
@click.option("--steps", type=click.IntRange(1), default=200, show_default=True,
              help="Of each loop.")  # fmt: skip
@click.option("--rounds", type=click.IntRange(1), default=4, show_default=True,
              help="In how many runs, one loop after the other.")  # fmt: skip
@click.option("--hiccup", type=click.FloatRange(0.0), metavar="MS", default=0.0,
              help=f"Hold the host up for so long at every {HICCUP_EVERY}th step.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    devices: tuple[float, ...],
    hosts: tuple[float, ...],
    depths: tuple[int | str, ...],
    steps: int,
    rounds: int,
    hiccup: float,
    as_json: bool,
) -> None:
    """The overlap loop against max(device, host), on a simulated device in real time.

    The normal loop takes device + host for a step. The overlap loop should take the longer of the
    two; --hiccup shows what happens when the host is late now and then.
    """
    each = -(-steps // rounds)
    if hiccup and each < HICCUP_EVERY:
        raise click.UsageError(f"--hiccup needs runs of {HICCUP_EVERY} steps: more --steps")

    async def measure_all() -> list[Mapping[str, Any]]:
        own = await own_ms()
        rows: list[Mapping[str, Any]] = []
        for device in devices:
            for host in hosts:
                rows += await measure(device, host, own, depths, each, rounds, hiccup)
        return rows

    with watching_others() as others:
        rows = run(measure_all())
    notes = [*NOTES, *([HICCUP_NOTE] if hiccup else [])]
    if not others.quiet:
        notes.append(f"Others used {others.cores:.2f} cores meanwhile: measure again.")
    settings = {"steps": each * rounds, "rounds": rounds, "depth": depths, "hiccup_ms": hiccup}
    Report.of("overlap", rows, settings=settings, notes=notes).show(as_json)


async def own_ms() -> float:
    """What the host takes for a step without a busy loop, in milliseconds."""
    device = min(DEVICE_MS)
    times = [(await run_loop(device, HostWork(), 0, HICCUP_EVERY)).step for _ in range(3)]
    return max(0.0, median(times) - device)


async def measure(
    device: float,
    host: float,
    own: float,
    depths: Sequence[int | str],
    steps: int,
    rounds: int,
    hiccup: float,
) -> list[Mapping[str, Any]]:
    """A row for each depth, in milliseconds; ``rounds`` runs of ``steps`` steps."""

    def side(depth: int | str) -> Callable[[], Awaitable[Loop]]:
        async def one_run() -> Loop:
            work = HostWork(max(0.0, host - own) / 1e3, hiccup / 1e3, HICCUP_EVERY)
            return await run_loop(device, work, depth, steps)

        return one_run

    runs = await alternate({depth: side(depth) for depth in (0, *depths)}, rounds)
    normal = Spread.of([loop.step for loop in runs[0]])
    rows: list[Mapping[str, Any]] = []
    for depth in depths:
        overlap, ideal = Spread.of([loop.step for loop in runs[depth]]), max(device, host)
        row: dict[str, Any] = {
            "device_ms": device,
            "host_ms": host,
            "depth": depth,
            "normal_ms": normal.median,
            "overlap_ms": overlap.median,
            "ideal_ms": ideal,
            "ratio": overlap.median / ideal,
            "low": overlap.low,
            "high": overlap.high,
            "own_ms": own,
        }
        if hiccup:
            hiccups = steps // HICCUP_EVERY
            row["idle_ms"] = Spread.of([loop.idle / hiccups for loop in runs[depth]]).median
            row["forced_ms"] = forced_ms(device, host + hiccup, depth)
        rows.append(row)
    return rows


def forced_ms(device: float, host: float, depth: int | str) -> float | None:
    """How long the device is idle when the host takes ``host`` ms for one step.

    When the host begins with a step's result, ``depth`` later ones are in flight. ``None`` for a
    depth that is chosen as it goes.
    """
    return max(0.0, host - depth * device) if isinstance(depth, int) else None


async def run_loop(device_ms: float, work: HostWork, depth: int | str, steps: int) -> Loop:
    """One engine at ``depth`` with ``STREAMS`` streams, over ``steps`` steps."""
    device = BusyHostDevice(CannedResults.drawn(VOCAB), work, device_ms / 1e3)
    settings: dict[str, Any] = {"overlap_depth": depth}
    params = SamplingParams(temperature=0.0, max_tokens=WARM_UP + steps + 2)
    async with Engine(NullModel(VOCAB), device=device, **settings) as engine:
        answers = [engine.generate([index], params) for index in range(STREAMS)]
        await asyncio.gather(*(_read(answer) for answer in answers))
    begin, end = work.committed[WARM_UP], work.committed[WARM_UP + steps]
    measured = device.forwards[WARM_UP : WARM_UP + steps + 1]
    idle = sum(max(0.0, b.started - a.finished) for a, b in pairwise(measured))
    return Loop(step=1e3 * (end - begin) / steps, idle=1e3 * idle)


async def _read(stream: TokenStream) -> None:
    async for _ in stream:
        pass
