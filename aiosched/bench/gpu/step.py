"""Part ``step``: a decode step of the engine, against the forward alone and against the memory."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

from aiosched.bench.gpu.bandwidth import copy_bandwidth
from aiosched.bench.gpu.bare import PAGE_SIZE, Bare, bare_step
from aiosched.bench.gpu.settings import Settings
from aiosched.bench.gpu.stretch import LEAD_IN, Stretch, answer_tokens, decode_stretch
from aiosched.bench.measure import Spread, alternate
from aiosched.config import EngineConfig
from aiosched.engine import Engine
from aiosched.model.dummy import load_dummy
from aiosched.model.loader import DTYPES, load_model

LOOPS = {"normal": 0, "overlap": 1}


async def measure(settings: Settings) -> AsyncIterator[dict[str, Any]]:
    """A row for each batch and loop; both loops run on the same weights, stretch by stretch."""
    bandwidth = copy_bandwidth(settings.device, settings.copy_bytes)
    floor = weight_bytes(settings.model, settings.dtype) / bandwidth
    model = load_model(settings.model, dtype=settings.dtype, device=settings.device)
    async with AsyncExitStack() as stack:
        engines = {
            loop: await stack.enter_async_context(Engine(model, config=_config(settings, depth)))
            for loop, depth in LOOPS.items()
        }
        for batch in settings.batches:
            length = settings.prompt_tokens + LEAD_IN + settings.steps // 2
            bare = bare_step(
                model, settings.device, batch=batch, length=length, calls=settings.steps
            )
            sides = {
                loop: partial(_stretch, engine, batch, settings) for loop, engine in engines.items()
            }
            stretches = await alternate(sides, settings.rounds)
            for loop, seen in stretches.items():
                yield {"batch": batch, "loop": loop} | _row(seen, bare, floor)


def weight_bytes(name: str, dtype: str) -> int:
    """Bytes of weights that a decode step reads: all but the rows of an embedding that is no
    output layer as well."""
    model: Any = load_dummy(name.removeprefix("dummy:"), DTYPES[dtype], "meta")[0]
    total: int = sum(weight.nbytes for weight in model.parameters())
    if not model.config.tie_word_embeddings:
        total -= model.get_input_embeddings().weight.nbytes
    return total


async def _stretch(engine: Engine, batch: int, settings: Settings) -> Stretch:
    return await decode_stretch(
        engine, batch, settings.prompt_tokens, settings.steps, _answer_tokens(settings, batch)
    )


def _answer_tokens(settings: Settings, batch: int) -> int:
    chunk = EngineConfig().prefill_chunk_tokens
    return answer_tokens(batch, settings.prompt_tokens, chunk, settings.steps)


def _config(settings: Settings, depth: int) -> EngineConfig:
    largest = max(settings.batches)
    tokens = settings.prompt_tokens + _answer_tokens(settings, largest)
    return EngineConfig(
        device=settings.device,
        overlap_depth=depth,
        max_running_requests=largest,
        kv_tokens=largest * (tokens + PAGE_SIZE),
        page_size=PAGE_SIZE,
        prefix_cache=False,
    )


def _row(seen: Sequence[Stretch], bare: Bare, floor: float) -> dict[str, Any]:
    step = Spread.of([stretch.step for stretch in seen])

    def middle(field: str) -> float:
        return Spread.of([getattr(stretch, field) for stretch in seen]).median

    idle = middle("idle")
    return {
        "step_ms": step.median * 1e3,
        "step_low_ms": step.low * 1e3,
        "step_high_ms": step.high * 1e3,
        "device_ms": middle("device") * 1e3,
        "host_ms": middle("host") * 1e3,
        "idle_gap_ms": idle * 1e3,
        "idle_gap_pct": 100 * idle / step.median,
        "bare": bare.name,
        "bare_ms": bare.seconds * 1e3,
        "ratio": step.median / bare.seconds,
        "floor_ms": floor * 1e3,
        "tok_s": middle("tokens") / step.median,
    }
