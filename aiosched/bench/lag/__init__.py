"""``aiosched bench lag``: what serving a model does to the event loop around it.

One process and one event loop: an engine, a small ASGI app on uvicorn, 32 streams over HTTP, and
now and then a prompt of 800 KB, which is too long for the model. The client is another process.
A callback that is due every 5 ms tells how late the loop is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

import click
import msgspec

from aiosched.bench.measure import alternate, watching_others
from aiosched.bench.report import Report
from aiosched.commands.options import engine_config, engine_options, overlap_option
from aiosched.commands.plug import Plug, pass_plug
from aiosched.commands.running import run
from aiosched.params import SamplingParams

if TYPE_CHECKING:
    from aiosched.bench.lag.phase import Phase
    from aiosched.config import EngineConfig

PARAMS = SamplingParams(temperature=0.0, max_tokens=128)
ABOUT = (
    "p50, p99, max: how late a callback comes that is due every 5 ms. ping: a request of another "
    "process every 20 ms, from when it was due to its answer. Medians over the rounds; of max and "
    "gc_max (the longest garbage collection) the largest; low and high: the rounds' p99."
)


@click.command(short_help="Lag of the event loop while it serves 32 streams.")
@click.option("--streams", type=click.IntRange(1), default=32, show_default=True)
@click.option(
    "--large-bytes",
    type=click.IntRange(1),
    default=800_000,
    show_default=True,
    help="Size of the large prompt, one every 2 seconds.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(0.1),
    default=6.0,
    show_default=True,
    help="Measured in each phase of a round.",
)
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True)
@click.option("--tiny", is_flag=True, help="A tiny model and little load, to see that it runs.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@overlap_option
@engine_options
@pass_plug
def command(plug: Plug, /, tiny: bool, as_json: bool, **flags: Any) -> None:
    """Measure the lag of an event loop that serves a model, unloaded and loaded.

    An engine, an ASGI app on uvicorn, 32 streams over HTTP and prompts of 800 KB share one event
    loop; the client is another process. Unloaded, the same app answers pings and nothing else.
    """
    settings = {name: flags.pop(name) for name in ("streams", "large_bytes", "seconds", "rounds")}
    config = engine_config(flags)
    if tiny:
        from aiosched.bench.lag.tiny import tiny_model

        plug = Plug(tiny_model())
        settings |= {"streams": 2, "large_bytes": 6000, "seconds": 0.2, "rounds": 1}
    run(_lag(plug, config, settings)).show(as_json)


async def _lag(plug: Plug, config: EngineConfig, settings: dict[str, Any]) -> Report:
    from aiosched.bench.lag.app import App, serving
    from aiosched.bench.lag.phase import Load, run_phase

    given = dict(settings)
    rounds, large_bytes, streams = given.pop("rounds"), given.pop("large_bytes"), given["streams"]
    loads = {
        "unloaded": Load(streams=0, seconds=given["seconds"]),
        "loaded": Load(
            streams=streams,
            seconds=given["seconds"],
            large_every=min(2.0, given["seconds"] / 2),
            large_bytes=large_bytes,
        ),
    }
    async with plug.opened(config) as engine, serving(App(engine, PARAMS)) as port:
        await run_phase(engine, port, msgspec.structs.replace(loads["loaded"], seconds=0.1))
        sides = {name: partial(run_phase, engine, port, load) for name, load in loads.items()}
        with watching_others() as others:
            phases = await alternate(sides, rounds)
        name = type(plug.model).__name__ if plug.model else config.model
        settings |= {"model": name, "dtype": config.dtype, "overlap_depth": config.overlap_depth}
    # The client is a child that has ended: watching_others counts it as ours.
    busy = f"Others used {others.cores:.2f} cores meanwhile."
    return Report.of(
        "lag",
        [row(name, seen) for name, seen in phases.items()],
        settings=settings,
        notes=[ABOUT, _refusals(phases["loaded"]), busy],
    )


def row(load: str, phases: Sequence[Phase]) -> dict[str, Any]:
    """One row from the rounds of one side."""

    def middle(field: str) -> float:
        values: list[float] = [getattr(phase, field) for phase in phases]
        return round(median(values), 3)

    p99s = [phase.p99_ms for phase in phases]
    return {
        "load": load,
        "p50_ms": middle("p50_ms"),
        "p99_ms": middle("p99_ms"),
        "p99_low_ms": round(min(p99s), 3),
        "p99_high_ms": round(max(p99s), 3),
        "max_ms": round(max(phase.max_ms for phase in phases), 3),
        "ping_p50_ms": middle("ping_p50_ms"),
        "ping_p99_ms": middle("ping_p99_ms"),
        "gc_max_ms": round(max(phase.gc_max_ms for phase in phases), 3),
        "tok_s": round(middle("tok_s"), 1),
    }


def _refusals(phases: Sequence[Phase]) -> str:
    """What became of the large prompts: whether they were tokenized, and how long it took."""
    answers = [answer for phase in phases for answer in phase.large]
    if not answers:
        return "No large prompt was answered in time."
    texts = Counter(text for _, _, text in answers)
    seconds = median(seconds for _, seconds, _ in answers)
    said = "; ".join(f"{count} times: {text}" for text, count in texts.items())
    return f"The large prompts were answered in {seconds:.2f} s (median), {said}"
