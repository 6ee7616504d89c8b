"""``aiosched demo``: several answers at once, and the two loops measured."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click
import msgspec

from aiosched.arguments import OF_LOADING
from aiosched.cli.complete import as_prompt
from aiosched.commands.options import engine_config, engine_options
from aiosched.commands.plug import Plug, pass_plug
from aiosched.commands.running import run
from aiosched.config import EngineConfig
from aiosched.params import SamplingParams

if TYPE_CHECKING:
    from aiosched.cli.board import Board
    from aiosched.cli.compare import Run
    from aiosched.engine import Engine
    from aiosched.prompts import Prompt

QUESTIONS = (
    "Why is the sky blue?",
    "Write a haiku about the sea.",
    "Give me three tips for better sleep.",
    "Translate to French: Good morning, my friend.",
    "What is 17 plus 25?",
    "Write a Python function that reverses a string.",
    "Tell a short story about a lighthouse keeper.",
    "Explain recursion to a child.",
)
PROMPT_TOKENS = 256
"""Room for a prompt in the KV cache; the questions take far less in any chat template."""


@click.command(short_help="See it work: eight answers at once, and both loops measured.")
@click.option(
    "--max-tokens",
    type=click.IntRange(2),
    default=64,
    show_default=True,
    help="Most tokens of an answer.",
)
@click.option(
    "--depth",
    "overlap_depth",
    type=click.IntRange(1, 8),
    default=1,
    show_default=True,
    help="Overlap depth that is compared with the normal loop.",
)
@click.option(
    "--rounds",
    type=click.IntRange(1),
    default=3,
    show_default=True,
    help="Measured runs of each loop.",
)
@click.option("--json", "as_json", is_flag=True, help="Print what was measured as one JSON object.")
@engine_options
@pass_plug
def demo(plug: Plug, /, max_tokens: int, rounds: int, as_json: bool, **flags: Any) -> None:
    """See eight prompts answered at once, then what the overlap does on this machine.

    The answers stream side by side. Then the overlap loop, in which the host works on one step's
    result while the device runs the next, is measured against the normal loop: same prompts, same
    model object, runs in turn, medians. Sampling is greedy and the model in float32 (--dtype
    changes that), so both loops should give the same tokens, and it says whether they did.
    """
    config = demo_config(engine_config(flags), max_tokens)
    run(_demo(plug, config, max_tokens, rounds, as_json))


def demo_config(config: EngineConfig, max_tokens: int) -> EngineConfig:
    """``config`` fit for the comparison.

    No prefix cache: a later run must not find the prompts of an earlier one there. The KV cache is
    as large as needed, for there are two of them.
    """
    changes: dict[str, Any] = {"prefix_cache": False}
    if config.dtype == "auto":
        changes["dtype"] = "float32"
    if config.kv_tokens is None:
        changes["kv_tokens"] = len(QUESTIONS) * (PROMPT_TOKENS + max_tokens)
    return msgspec.structs.replace(config, **changes)


async def _demo(
    plug: Plug, config: EngineConfig, max_tokens: int, rounds: int, as_json: bool
) -> None:
    from aiosched.cli.compare import compare
    from aiosched.cli.report import Report
    from aiosched.engine import Engine

    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    async with plug.opened(config, plain=not as_json) as overlap:
        prompts = [as_prompt(overlap, question) for question in QUESTIONS]
        with _board(max_tokens, as_json) as board:
            await stream_all(overlap, prompts, params, board)
        normal_config = msgspec.structs.replace(config, overlap_depth=0, **OF_LOADING)
        async with Engine(overlap.model, config=normal_config) as normal:
            warm_up = msgspec.structs.replace(params, max_tokens=2)
            await compare(normal, overlap, prompts, warm_up, 1)
            if not as_json:
                click.echo(f"\nMeasuring both loops in turn, {2 * rounds} runs:")
            runs = await compare(
                normal, overlap, prompts, params, rounds, _silent if as_json else _say_run
            )
        report = Report.of(config, runs)
        if as_json:
            click.echo(msgspec.json.encode(report))
        else:
            report.show()


async def stream_all(
    engine: Engine, prompts: Sequence[Prompt], params: SamplingParams, board: Board
) -> None:
    """Submit all prompts at once, and show their tokens as they come."""

    async def stream(index: int, prompt: Prompt) -> None:
        async with engine.generate(prompt, params) as answer:
            async for token in answer:
                board.token(index, token)

    await asyncio.gather(*(stream(index, prompt) for index, prompt in enumerate(prompts)))


def _say_run(run: Run) -> None:
    loop = "normal loop" if run.depth == 0 else f"overlap, depth {run.depth}"
    click.echo(
        f"  {loop:<18} {run.tokens} tokens, {run.steps} steps in {run.seconds:.2f} s: "
        f"{1e3 * run.seconds / run.steps:.2f} ms a step"
    )


def _silent(run: Run) -> None:
    pass


def _board(max_tokens: int, as_json: bool) -> Board:
    from rich.console import Console

    from aiosched.cli.board import LineBoard, LiveBoard, SilentBoard

    if as_json:
        return SilentBoard()
    console = Console()
    if console.is_terminal and not console.is_dumb_terminal:
        return LiveBoard(QUESTIONS, max_tokens, console)
    return LineBoard(QUESTIONS)
