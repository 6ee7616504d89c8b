"""``aiosched timeline``: both loops drawn, device lane above host lane."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from aiosched.arguments import OF_LOADING
from aiosched.cli.complete import as_prompt
from aiosched.cli.demo import QUESTIONS
from aiosched.commands.options import engine_config, engine_options
from aiosched.commands.out_file import OutFile
from aiosched.commands.plug import Plug, pass_plug
from aiosched.commands.running import run
from aiosched.config import EngineConfig
from aiosched.observe.page import SHOWN_STEPS, summary
from aiosched.observe.timeline import FORMATS, Timeline, save
from aiosched.params import SamplingParams

if TYPE_CHECKING:
    from aiosched.engine import Engine
    from aiosched.observe.records import StepRecord
    from aiosched.prompts import Prompt

WARM_UP = 16
"""Steps with all streams that are left out before the drawing begins."""
STEPS = 200
"""Steps that are drawn, if the run has as many."""
MAX_TOKENS = WARM_UP + STEPS + 16
STREAMS, DEVICE_MS = 1024, 5.0
MODEL_STREAMS = 8
PROMPT_TOKENS = 8  # of the simulation, and
VOCAB_SIZE = 32_768


@click.command(short_help="Draw both loops, step by step, into a page.")
@click.argument("out", type=OutFile())
@click.option(
    "--depth",
    "overlap_depth",
    type=click.IntRange(1, 8),
    default=1,
    show_default=True,
    help="Overlap depth that is drawn below the normal loop.",
)
@click.option(
    "--streams",
    type=click.IntRange(1),
    help=f"Requests at once.  [default: {STREAMS}; {MODEL_STREAMS} with --model]",
)
@click.option(
    "--device-ms",
    type=click.FloatRange(0.1, 1000.0),
    help=f"Time of a step on the simulated device.  [default: {DEVICE_MS:g}]",
)
@engine_options
@pass_plug
def timeline(
    plug: Plug, /, out: Path, streams: int | None, device_ms: float | None, **flags: Any
) -> None:
    """Run a short workload under the normal and the overlap loop, and draw both into OUT.

    OUT.html is a page that a browser shows without a network. OUT.json is a trace for
    https://ui.perfetto.dev.

    Without --model the device is simulated: its steps take --device-ms of real time, and the host
    is the real thing, the scheduler and a task for each stream that makes JSON of its tokens. With
    --model the device computes. Drawn are decode steps, once all streams take part.

    \b
    Examples:
      aiosched timeline loops.html
      aiosched timeline loops.html --streams 256 --device-ms 2 --depth 2
      aiosched timeline loops.json --model smollm2-135m-instruct
    """
    if out.suffix not in FORMATS:
        raise click.UsageError(f"OUT must end with {' or '.join(FORMATS)}")
    if flags["model"] is not None:
        if device_ms is not None:
            raise click.UsageError("--device-ms is for the simulated device, not for --model")
        config, streams = engine_config(flags), streams or MODEL_STREAMS
        heading = f"{config.model}, {streams} streams"
        drawn = run(_of_model(plug, config, streams))
    else:
        for name, value in flags.items():
            if value is not None and name != "overlap_depth":
                raise click.UsageError(f"--{name.replace('_', '-')} needs --model")
        device_ms, streams = device_ms or DEVICE_MS, streams or STREAMS
        heading = f"Simulated device, {device_ms:g} ms a step; the host serves {streams} streams"
        drawn = run(_of_simulation(flags["overlap_depth"], streams, device_ms))
    save(drawn, out, heading)
    click.echo(f"{out}: {summary(drawn)}")


async def _of_simulation(depth: int, streams: int, device_ms: float) -> list[Timeline]:
    from aiosched.bench.canned_sim import CannedSimDevice
    from aiosched.bench.null_device import CannedResults, NullModel
    from aiosched.engine import Engine

    prompts = [[1] * PROMPT_TOKENS] * streams
    settings: dict[str, Any] = {
        "kv_tokens": streams * (PROMPT_TOKENS + MAX_TOKENS + 16),
        "max_running_requests": streams,
        "prefill_chunk_tokens": streams * PROMPT_TOKENS,
        "prefix_cache": False,
        "timeline": True,
    }
    drawn = []
    for overlap_depth in (0, depth):
        results = CannedResults.drawn(VOCAB_SIZE)
        device = CannedSimDevice(results, forward_time=device_ms / 1e3, realtime=True)
        model = NullModel(VOCAB_SIZE)
        async with Engine(model, device=device, overlap_depth=overlap_depth, **settings) as engine:
            drawn.append(await _drawn(engine, prompts))
    return drawn


async def _of_model(plug: Plug, config: EngineConfig, streams: int) -> list[Timeline]:
    from aiosched.engine import Engine

    config = msgspec.structs.replace(config, prefix_cache=False, timeline=True)
    async with plug.opened(config) as overlap:
        questions = (QUESTIONS[index % len(QUESTIONS)] for index in range(streams))
        prompts = [as_prompt(overlap, question) for question in questions]
        below = await _drawn(overlap, prompts)
    normal_config = msgspec.structs.replace(config, overlap_depth=0, **OF_LOADING)
    async with Engine(overlap.model, config=normal_config) as normal:
        return [await _drawn(normal, prompts), below]


async def _drawn(engine: Engine, prompts: Sequence[Prompt]) -> Timeline:
    """Serve all prompts at once, and return the steps to be drawn."""
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)

    async def read(prompt: Prompt) -> None:
        async with engine.generate(prompt, params) as stream:
            async for token in stream:
                msgspec.json.encode(token)

    # As a server does once it has started: a full collection would else walk all of torch.
    gc.collect()
    gc.freeze()
    try:
        await asyncio.gather(*(read(prompt) for prompt in prompts))
    finally:
        gc.unfreeze()
    depth = engine.config.overlap_depth
    title = f"overlap loop, depth {depth}" if depth else "normal loop"
    return steady(engine.timeline().records, len(prompts), title)


def steady(records: Sequence[StepRecord], streams: int, title: str) -> Timeline:
    """The steps in which all ``streams`` decode, after a warm-up.

    Time 0 is where a stretch of steps begins that is typical of them, and so is what is in view
    when the page opens.

    Raises:
        ClickException: there are not enough of them.
    """
    full = [i for i, r in enumerate(records) if r.mode == "decode" and r.sequences == streams]
    if len(full) < WARM_UP + SHOWN_STEPS:
        raise click.ClickException(
            f"the engine decoded all {streams} streams at once in {len(full)} steps only: "
            "give fewer --streams, or more --kv-tokens"
        )
    drawn = [records[i] for i in full[WARM_UP : WARM_UP + STEPS]]
    return Timeline(drawn, title, origin=drawn[typical(drawn, SHOWN_STEPS)].device_started)


def typical(records: Sequence[StepRecord], length: int) -> int:
    """Where the stretch of ``length`` steps begins that takes the median time of all such."""
    # Not from the very first step: of the host's work before it nothing was recorded.
    starts = range(min(2, len(records) - length), len(records) - length + 1)
    seconds = {i: records[i + length - 1].committed - records[i].device_started for i in starts}
    return sorted(starts, key=seconds.__getitem__)[len(starts) // 2]
