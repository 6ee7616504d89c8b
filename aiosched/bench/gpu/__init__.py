"""``aiosched bench gpu``: what there is to know of one GPU, in under nine minutes.

Its parts, each in a process of its own: ``bandwidth`` of the memory; ``wake-up``, from the end of
device work to the coroutine; ``step``, a decode step under both loops against the replay of the
bare CUDA graph; ``equality`` of FlashInfer and plain torch; ``continuous-batching``, transformers'
own. Weights are random, in the shapes of real models.
"""

from __future__ import annotations

from contextlib import aclosing
from time import monotonic

import click
import msgspec
from rich.console import Console
from rich.text import Text

from aiosched.bench.gpu.parts import Row, run_part
from aiosched.bench.gpu.settings import MODELS, PARTS, TIME_LIMIT, TINY, TINY_MODELS, Part, Settings
from aiosched.bench.report import Report, print_rows
from aiosched.commands.running import run

NOTES = (
    "ratio: step against the bare forward, which neither samples nor stages (a graph's replay, or "
    "a plain forward where the model runs without graphs). idle_gap: the device between two "
    "forwards. floor: weight bytes ÷ copy bandwidth.",
    "wake_up: an awaited launch against one whose end the loop's thread looks for.",
    "The tests that need a GPU: pytest -m cuda.",
)


@click.command(short_help="Step time, idle gap and wake-up latency on one GPU.")
@click.option("--device", default="cuda", show_default=True, help="cuda, cuda:N, or cpu.")
@click.option(
    "--model",
    "models",
    multiple=True,
    help="dummy: shape; repeatable.  [default: Llama-3.1-8B and Qwen3-0.6B]",
)
@click.option("--batch", "batches", type=click.IntRange(1), multiple=True,
              help="Sequences at once; repeatable.  [default: 1, 8, 64, 256]")  # fmt: skip
@click.option(
    "--part",
    "names",
    type=click.Choice([part.name for part in PARTS]),
    multiple=True,
    help="Only this part; repeatable.",
)
@click.option("--tiny", is_flag=True, help="Tiny models and few steps, to see that it runs.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    device: str,
    models: tuple[str, ...],
    batches: tuple[int, ...],
    names: tuple[str, ...],
    tiny: bool,
    as_json: bool,
) -> None:
    """Measure one GPU: decode steps of two models, idle gaps, wake-up latency, rivals.

    Each part runs in a process of its own, has a time limit, and is shown when it is done, on
    standard error with --json. One that fails is a row with an error. With --device cpu --tiny it
    runs anywhere; a plain forward takes the place of the graph's replay there.
    """
    if any(not model.startswith("dummy:") for model in models):
        raise click.UsageError("--model: bench gpu takes dummy: shapes")
    settings = Settings(device=device, **(TINY if tiny else {}))
    if batches:
        settings = msgspec.structs.replace(settings, batches=batches)
    models = models or (TINY_MODELS if tiny else MODELS)
    jobs = [
        (part, msgspec.structs.replace(settings, model=model))
        for part in PARTS
        if not names or part.name in names
        for model in (models if part.per_model else models[-1:])
    ]
    report = run(_measure(jobs, settings, Console(stderr=as_json)))
    if as_json:
        report.show(as_json=True)
        return
    click.echo(f"That was {report.machine.gpu or report.machine.cpu}.")
    for note in report.notes:
        click.echo(note)


async def _measure(
    jobs: list[tuple[Part, Settings]], settings: Settings, console: Console
) -> Report:
    gpu, rows = None, list[Row]()
    ends_at = monotonic() + TIME_LIMIT
    for part, told in jobs:
        about = {"part": part.name}
        if part.per_model:
            about["model"] = told.model.partition("?")[0]
        console.print(Text(" ".join(about.values()), style="bold"))
        own: list[Row] = []
        seconds = min(part.seconds, ends_at - monotonic())
        async with aclosing(run_part(part, told, seconds)) as found:
            async for row in found:
                if "gpu" in row:
                    gpu = row["gpu"]
                else:
                    own.append(row)
        print_rows(own, console)
        rows += [about | row for row in own]
    asked = {name: getattr(settings, name) for name in settings.__struct_fields__}
    asked["model"] = list(dict.fromkeys(told.model for _, told in jobs))
    return Report.of("gpu", rows, settings=asked, notes=NOTES, gpu=gpu)
