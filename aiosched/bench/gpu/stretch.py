"""A stretch of steady decoding on an engine, and what its steps cost."""

from __future__ import annotations

import asyncio
from time import perf_counter
from typing import NamedTuple

from aiosched.bench.idle import until_idle
from aiosched.bench.readers import ending
from aiosched.engine import Engine
from aiosched.observe.stats import EngineStats
from aiosched.params import SamplingParams
from aiosched.stream import TokenStream

LEAD_IN = 4
"""Steps in which all sequences decode before a stretch is measured."""


class Stretch(NamedTuple):
    """Seconds a step.

    Attributes:
        step: by the clock.
        device: in the forward and the sampling, by the device's events.
        idle: between two forwards, by the device's events.
        host: in which the scheduler kept the event loop busy.
        tokens: sampled in a step.
    """

    step: float
    device: float
    idle: float
    host: float
    tokens: float


def answer_tokens(batch: int, prompt_tokens: int, chunk: int, steps: int) -> int:
    """Enough for every sequence to decode until the stretch is over: the first ones begin while
    the prompts of the last are still read in."""
    return 2 * (-(-batch * prompt_tokens // chunk)) + LEAD_IN + steps + 16


async def decode_stretch(
    engine: Engine, batch: int, prompt_tokens: int, steps: int, max_tokens: int
) -> Stretch:
    """Let ``batch`` sequences decode, and measure ``steps`` steps in which all of them do."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    marks: list[tuple[EngineStats, float]] = []
    started = 0
    over = asyncio.get_running_loop().create_future()

    async def read(stream: TokenStream) -> None:
        nonlocal started
        own = 0
        begun_last = False
        async for _ in stream:
            own += 1
            if own == 1:
                started += 1
                begun_last = started == batch
            if begun_last and own in (LEAD_IN, LEAD_IN + steps):
                marks.append((engine.stats(), perf_counter()))
                if len(marks) == 2:
                    over.set_result(None)

    streams = [
        engine.generate([2 + (7 * n + i) % 89 for i in range(prompt_tokens)], params)
        for n in range(batch)
    ]
    readers = [asyncio.create_task(read(stream)) for stream in streams]
    async with ending(readers):
        try:
            await asyncio.wait([*readers, over], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for stream in streams:
                stream.abort()
        await asyncio.gather(*readers)
    await until_idle(engine)
    if len(marks) < 2:
        raise RuntimeError(f"a sequence ended before {steps} steps were measured")
    (first, began), (last, ended) = marks
    return _between(first, last, ended - began)


def _between(first: EngineStats, last: EngineStats, seconds: float) -> Stretch:
    steps = last.steps - first.steps
    return Stretch(
        step=seconds / steps,
        device=(last.device_seconds - first.device_seconds) / steps,
        idle=(last.idle_gap_seconds - first.idle_gap_seconds) / steps,
        host=(last.host_seconds - first.host_seconds) / steps,
        tokens=(last.tokens - first.tokens) / steps,
    )
