"""``aiosched bench offline``: tokens a second on a real model, beside other engines.

Every engine runs in a process of its own, and all of them take turns round by round: the same
prompts, greedy, the same number of new tokens for each. A round of one engine at one batch size is
two orders: one new token (``prefill_s``), then all of them; what lies between the two is decoding.
"""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import click
import msgspec

from aiosched.bench.measure import BUSY, Foreign, Spread, alternate
from aiosched.bench.peers.checkpoint import Checkpoint, prepare
from aiosched.bench.peers.engines import (
    OWN,
    PEERS,
    Contestant,
    Workload,
    aiosched_engines,
    llama_cpp_engines,
    transformers_engines,
    vllm_engines,
)
from aiosched.bench.peers.process import EngineProcess, EngineProcessFailed
from aiosched.bench.report import Report, this_machine
from aiosched.commands.running import run
from aiosched.config import DTYPES, QUANTIZATIONS, EngineConfig
from aiosched.errors import AioschedError

TINY_MODEL = (
    "dummy:llama?hidden_size=32&intermediate_size=64&num_hidden_layers=1&num_attention_heads=2"
    "&num_key_value_heads=1&head_dim=16&vocab_size=128&max_position_embeddings=128"
)


class Round(msgspec.Struct, frozen=True):
    """One engine at one batch size, once.

    Attributes:
        prefill_s: the order with one new token, in seconds.
        total_s: the order with all of them.
        others: cores that other processes used during the latter.
    """

    prefill_s: float
    total_s: float
    others: Foreign


@click.command(short_help="Tokens a second on a real model, beside other engines.")
@click.option("--model", default=EngineConfig().model, show_default=True, metavar="MODEL")
@click.option("--batch", type=click.IntRange(1, 1024), multiple=True, default=(1, 8, 32),
              show_default=True, help="Prompts at once; repeatable.")  # fmt: skip
@click.option("--prompt-tokens", type=click.IntRange(1), default=64, show_default=True)
@click.option("--new-tokens", type=click.IntRange(2), default=64, show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True)
@click.option("--dtype", type=click.Choice([d for d in DTYPES if d != "auto"]), default="bfloat16",
              show_default=True, help="Of weights and KV.")  # fmt: skip
@click.option("--threads", type=click.IntRange(1),
              help="Compute threads of every engine; aiosched chooses itself, others take a "
                   "thread for each core if not given.")  # fmt: skip
@click.option("--quantization", type=click.Choice(QUANTIZATIONS[1:]), multiple=True,
              help="Also aiosched with weights in this kind; repeatable.")  # fmt: skip
@click.option("--compile", "compiled", is_flag=True, help="Also aiosched with a compiled step.")
@click.option("--engine", "own", type=click.Choice(OWN), multiple=True, default=OWN,
              show_default=True, help="Engines of this environment; repeatable.")  # fmt: skip
@click.option("--peer", "peers", multiple=True, metavar="NAME=PYTHON",
              help=f"Also this engine ({' or '.join(PEERS)}), by the interpreter of an environment "
                   "that has it (vllm; llama-cpp-python); repeatable.")  # fmt: skip
@click.option("--tiny", is_flag=True, help="A toy model, few tokens: shows only that it runs.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    model: str,
    batch: tuple[int, ...],
    prompt_tokens: int,
    new_tokens: int,
    rounds: int,
    dtype: str,
    threads: int | None,
    quantization: tuple[str, ...],
    compiled: bool,
    own: tuple[str, ...],
    peers: tuple[str, ...],
    tiny: bool,
    as_json: bool,
) -> None:
    """Measure decoding on the CPU: aiosched beside transformers, and beside PEERs.

    Rows: engine, batch, dtype, prefill_s, decode_tok_s, step_ms, start_s (from the start of the
    process to its first token), rss_mb; with --json also quartiles, runs and the cores that others
    used.
    """
    interpreters = [_named(peer) for peer in peers]
    if tiny:
        model, batch, prompt_tokens, new_tokens, rounds = TINY_MODEL, (1, 2), 4, 16, 1
    work = Workload(
        model=model,
        dtype=dtype,
        threads=threads,
        cores=this_machine().cores,
        max_batch=max(batch),
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        cache_dir=EngineConfig.from_env().cache_dir,
    )
    settings = {
        "model": model, "batch": batch, "prompt_tokens": prompt_tokens, "new_tokens": new_tokens,
        "rounds": rounds, "dtype": dtype, "threads": threads, "quantization": quantization,
        "compile": compiled, "engine": own, "peer": [name for name, _ in interpreters],
    }  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="aiosched-offline-") as scratch:
        gguf = any(name == "llama.cpp" for name, _ in interpreters)
        try:
            checkpoint = prepare(model, dtype, Path(scratch), work.cache_dir, for_gguf_readers=gguf)
            field = list(_contestants(work, checkpoint, own, quantization, compiled, interpreters))
        except (AioschedError, ValueError) as error:
            raise click.ClickException(str(error)) from error
        prompts = random_prompts(checkpoint.vocab_size, max(batch), prompt_tokens)
        rows, notes, versions = run(race(field, prompts, batch, new_tokens, rounds))
    report = Report.of(
        "offline", rows if as_json else [brief(row) for row in rows], settings=settings, notes=notes
    )
    report = msgspec.structs.replace(report, versions={**report.versions, **versions})
    report.show(as_json)


async def race(
    field: Sequence[Contestant],
    prompts: Sequence[Sequence[int]],
    batches: Sequence[int],
    new_tokens: int,
    rounds: int,
) -> tuple[list[dict[str, Any]], list[str], dict[str, str]]:
    """Start everybody, let them take turns, and end them.

    Returns:
        A row for each contestant that stayed to the end and each batch size, notes on those that
        did not and on runs that others disturbed, and the versions of all packages.
    """
    notes: list[str] = []
    running: dict[int, EngineProcess] = {}
    async with AsyncExitStack() as stack:
        for index, contestant in enumerate(field):
            process = EngineProcess(
                contestant.python, contestant.driver, contestant.settings, contestant.environ
            )
            stack.push_async_callback(process.close)
            try:
                await process.start()
                for batch in batches:  # what an engine does only once for each shape
                    await process.generate(prompts[:batch], min(4, new_tokens))
            except EngineProcessFailed as error:
                notes.append(f"{contestant.engine} ({contestant.dtype}): {error}")
            else:
                running[index] = process

        def side(index: int, batch: int) -> Callable[[], Awaitable[Round | None]]:
            async def run() -> Round | None:
                process = running.get(index)
                if process is None:
                    return None
                try:
                    first, _ = await process.generate(prompts[:batch], 1)
                    whole, others = await process.generate(prompts[:batch], new_tokens)
                except EngineProcessFailed as error:
                    notes.append(f"{field[index].engine} ({field[index].dtype}): {error}")
                    del running[index]
                    return None
                return Round(first.seconds, whole.seconds, others)

            return run

        sides = {(batch, index): side(index, batch) for batch in batches for index in running}
        results = await alternate(sides, rounds)
        rows = [
            row_of(field[index], running[index], batch, new_tokens, [run for run in runs if run])
            for (batch, index), runs in results.items()
            if index in running
        ]
        versions = {field[index].package: process.version for index, process in running.items()}
    notes += _disturbed(rows, rounds)
    return rows, notes, versions


def row_of(
    contestant: Contestant,
    process: EngineProcess,
    batch: int,
    new_tokens: int,
    rounds: Sequence[Round],
) -> dict[str, Any]:
    """Medians and quartiles of the rounds in which the machine was ours; of all if there is none.

    The first of the new tokens belongs to the prefill: ``new_tokens - 1`` steps decode.
    """
    runs = [run for run in rounds if run.others.quiet] or rounds
    prefill = Spread.of([run.prefill_s for run in runs])
    steps = Spread.of([(run.total_s - run.prefill_s) / (new_tokens - 1) for run in runs])
    rate = Spread.of([batch * (new_tokens - 1) / (run.total_s - run.prefill_s) for run in runs])
    return {
        "engine": contestant.engine,
        "batch": batch,
        "dtype": contestant.dtype,
        "prefill_s": prefill.median,
        "prefill_low": prefill.low,
        "prefill_high": prefill.high,
        "decode_tok_s": rate.median,
        "decode_low": rate.low,
        "decode_high": rate.high,
        "step_ms": 1e3 * steps.median,
        "start_s": process.start_s,
        "rss_mb": process.rss_mb(),
        "runs": len(runs),
        "foreign_cores": max(run.others.cores for run in runs),
    }


def brief(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row as narrow as a table needs it, the quartiles of the rate beside their median."""
    rate, low, high = (f"{row[f'decode_{key}']:.0f}" for key in ("tok_s", "low", "high"))
    return {
        "engine": row["engine"],
        "batch": row["batch"],
        "dtype": row["dtype"],
        "prefill_s": row["prefill_s"],
        "decode_tok_s": f"{rate} ({low}–{high})",
        "step_ms": row["step_ms"],
        "start_s": row["start_s"],
        "rss_mb": row["rss_mb"],
        "foreign": row["foreign_cores"],
    }


def random_prompts(vocab_size: int, count: int, tokens: int) -> list[list[int]]:
    """The same token ids at every call: no engine looks at what they mean."""
    draw = random.Random(0)
    return [[draw.randrange(vocab_size) for _ in range(tokens)] for _ in range(count)]


def _contestants(
    work: Workload,
    checkpoint: Checkpoint,
    own: Sequence[str],
    quantizations: Sequence[str],
    compiled: bool,
    interpreters: Sequence[tuple[str, str]],
) -> Iterator[Contestant]:
    if "aiosched" in own:
        yield from aiosched_engines(work, quantizations, compiled)
    if "transformers" in own:
        yield from transformers_engines(work, checkpoint)
    for name, python in interpreters:
        engines = {"vllm": vllm_engines, "llama.cpp": llama_cpp_engines}[name]
        yield from engines(python, work, checkpoint)


def _named(peer: str) -> tuple[str, str]:
    name, _, python = peer.partition("=")
    if name not in PEERS or not python:
        raise click.BadParameter(
            f"{peer!r} is not NAME=PYTHON with a NAME of {', '.join(PEERS)}", param_hint="--peer"
        )
    return name, os.path.expanduser(python)


def _disturbed(rows: Sequence[Mapping[str, Any]], rounds: int) -> Iterator[str]:
    for row in rows:
        who = f"{row['engine']} ({row['dtype']}) at batch {row['batch']}"
        if row["runs"] < rounds:
            yield f"{who}: {rounds - row['runs']} of {rounds} rounds left out, others were busy."
        elif row["foreign_cores"] > BUSY:
            yield f"{who}: others used up to {row['foreign_cores']:.2f} cores in every round."
