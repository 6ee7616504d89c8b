"""``aiosched bench host``: what the host does in a step, part by part.

The device costs nothing, and all else is real: the scheduler, the runner's launches, a stream for
each request with a task that reads it, text made by the model's own tokenizer. What is measured is
CPU time of the event loop's thread, over steps in which every stream decodes.

The parts come from runs that differ in one thing each: streams with text, streams of ids alone, and
streams that nobody reads; in the last a clock stands around each word of the loop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import click

from aiosched.bench.measure import Spread, alternate, watching_others
from aiosched.bench.parts import NAMES, Parts
from aiosched.bench.report import Report
from aiosched.bench.steady import (
    FEATURES,
    PAGE_SIZE,
    Load,
    Steady,
    Vocabulary,
    plain_asyncio,
)
from aiosched.commands.running import run
from aiosched.text.tokenizer import Tokenizer

BATCHES = (1, 8, 64, 256, 1024, 4096)
ROW_STEPS = 40_000  # rows times steps of one measurement, about

NOTES = (
    "us_per_step: CPU time of the event loop's thread for a step, in µs; low and high are its"
    " quartiles. It is the sum of the columns from intake to detokenize.",
    "turn: what a turn of the loop costs beside intake, plan, launch and commit. fan-out: waking"
    " all readers, each taking its token. detokenize: text.",
    "Tokens are as frequent as words in a text. What is there when all streams decode is frozen"
    " (gc.freeze), as a server does once it is up; the garbage collector stays on.",
    "floor_us: asyncio alone, with one future and one wake-up for each row, and nothing else.",
)


@click.command("host", short_help="What the host does in a step, part by part.")
@click.option(
    "--batch", "batches", type=click.IntRange(1, 65536), multiple=True, default=BATCHES,
    show_default=True, help="Streams that decode side by side. May be given several times.",
)  # fmt: skip
@click.option(
    "--depth", "depths", type=click.IntRange(0, 8), multiple=True, default=(1,),
    show_default=True, help="Depth of the overlap; 0 is the normal loop. Also several times.",
)  # fmt: skip
@click.option(
    "--features", type=click.Choice(list(FEATURES)), multiple=True, default=("all",),
    show_default=True,
    help="plain: greedy, ends by length alone, no prefix cache. all: end tokens, a stop token and "
    "a deadline for each request, and the prefix cache. sampled: and drawn with a seed. "
    "stop-strings: and a stop string. Also several times.",
)  # fmt: skip
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True,
              help="Runs of each kind, in turn.")  # fmt: skip
@click.option("--steps", type=click.IntRange(1), default=None,
              help="Steps of one measurement, five in a run.  [default: by the batch]")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    batches: tuple[int, ...],
    depths: tuple[int, ...],
    features: tuple[str, ...],
    rounds: int,
    steps: int | None,
    as_json: bool,
) -> None:
    """What the host does in a step, part by part, on a device of zero cost.

    Each stream has a task of its own that reads it, and text. Times are CPU time of the event
    loop's thread, on uvloop.
    """
    tokenizer = load_tokenizer()
    loads = [
        Load(batch=batch, depth=depth, features=name, window=steps or window_of(batch))
        for name in features
        for depth in depths
        for batch in batches
    ]
    with watching_others() as others:
        rows = [run(measure(load, tokenizer, rounds)) for load in loads]
    notes = list(NOTES)
    if not others.quiet:
        notes.append(f"Others used {others.cores:.2f} cores meanwhile: measure again.")
    settings = {"batch": batches, "depth": depths, "features": features, "rounds": rounds}
    Report.of("host", rows, settings=settings, notes=notes).show(as_json)


def load_tokenizer() -> Tokenizer:
    """The tokenizer of the built-in model."""
    from aiosched.config import EngineConfig
    from aiosched.model.builtin import BUILTIN_MODELS, builtin_file
    from aiosched.model.gguf_file import GGUFFile
    from aiosched.model.gguf_tokenizer import load_gguf_tokenizer

    config = EngineConfig.from_env()
    cache = Path(config.cache_dir or "~/.cache/aiosched").expanduser()
    path = builtin_file(BUILTIN_MODELS["smollm2-135m-instruct"], cache, lambda *_: None)
    return Tokenizer(load_gguf_tokenizer(GGUFFile(path)))


def window_of(batch: int) -> int:
    """Steps of one measurement: whole pages for each stream."""
    pages = max(1, min(20, ROW_STEPS // batch // PAGE_SIZE))
    return pages * PAGE_SIZE


async def measure(load: Load, tokenizer: Tokenizer, rounds: int) -> Mapping[str, Any]:
    """One row of the table."""
    vocabulary = Vocabulary.of(tokenizer)
    parts = Parts()

    async def floor() -> list[float]:
        return await plain_asyncio(load.batch, load.window, load.windows)

    times = await alternate(
        {
            "whole": lambda: Steady(load, vocabulary, tokenizer).run(),
            "no text": lambda: Steady(load, vocabulary).run(),
            "nobody reads": lambda: Steady(load, vocabulary, read=False, parts=parts).run(),
            "floor": floor,
        },
        rounds,
    )
    spreads = {
        side: Spread.of([1e6 * t for run in runs for t in run]) for side, runs in times.items()
    }
    return as_row(load, spreads, parts.windows)


def as_row(
    load: Load, us: Mapping[str, Spread], windows: Sequence[Mapping[str, float]]
) -> Mapping[str, Any]:
    """A row, in µs a step, from the spreads of the runs and the parts in seconds a window."""
    whole, silent = us["whole"], us["nobody reads"].median
    parts = {name: 1e6 * median(w[name] for w in windows) / load.window for name in NAMES}
    return {
        "batch": load.batch,
        "features": load.features,
        "depth": load.depth,
        "us_per_step": whole.median,
        "low": whole.low,
        "high": whole.high,
        **parts,
        "turn": silent - sum(parts.values()),
        "fan-out": us["no text"].median - silent,
        "detokenize": whole.median - us["no text"].median,
        "floor_us": us["floor"].median,
    }
