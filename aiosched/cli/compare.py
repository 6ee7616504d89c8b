"""The two loops measured against each other: same prompts, same model object, same process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from time import perf_counter

import msgspec

from aiosched.config import EngineConfig
from aiosched.engine import Engine
from aiosched.params import SamplingParams
from aiosched.prompts import Prompt


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One run of all prompts at once. Times in seconds, summed over its steps.

    Attributes:
        seconds: from the submission to the end of the last answer.
        tokens: in the answers; ``token_ids`` are these, by prompt.
    """

    depth: int
    seconds: float
    steps: int
    tokens: int
    device_seconds: float
    host_seconds: float
    idle_gap_seconds: float
    token_ids: tuple[tuple[int, ...], ...]


class Medians(msgspec.Struct, frozen=True, kw_only=True):
    """Of several runs at one depth: medians, in milliseconds a step, and tokens a second."""

    depth: int
    runs: int
    step_ms: float
    device_ms: float
    host_ms: float
    idle_gap_ms: float
    tokens_per_second: float
    step_ms_low: float
    step_ms_high: float

    @classmethod
    def of(cls, runs: Sequence[Run]) -> Medians:
        step = [1e3 * run.seconds / run.steps for run in runs]
        return cls(
            depth=runs[0].depth,
            runs=len(runs),
            step_ms=median(step),
            device_ms=median(1e3 * run.device_seconds / run.steps for run in runs),
            host_ms=median(1e3 * run.host_seconds / run.steps for run in runs),
            idle_gap_ms=median(1e3 * run.idle_gap_seconds / run.steps for run in runs),
            tokens_per_second=median(run.tokens / run.seconds for run in runs),
            step_ms_low=min(step),
            step_ms_high=max(step),
        )


async def measure(engine: Engine, prompts: Sequence[Prompt], params: SamplingParams) -> Run:
    """Submit all prompts at once and wait for all answers. Nothing else should run meanwhile."""
    before = engine.stats()
    began = perf_counter()
    answers = await asyncio.gather(*(engine.complete(prompt, params) for prompt in prompts))
    seconds = perf_counter() - began
    after = engine.stats()
    # A step that was launched before the last end was known is still in flight.
    while engine.stats().running:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    return Run(
        depth=fixed_depth(engine.config),
        seconds=seconds,
        steps=after.steps - before.steps,
        tokens=sum(answer.usage.completion_tokens for answer in answers),
        device_seconds=after.device_seconds - before.device_seconds,
        host_seconds=after.host_seconds - before.host_seconds,
        idle_gap_seconds=after.idle_gap_seconds - before.idle_gap_seconds,
        token_ids=tuple(answer.token_ids for answer in answers),
    )


async def compare(
    normal: Engine,
    overlap: Engine,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    rounds: int,
    after_each: Callable[[Run], object] = lambda run: None,
) -> Mapping[int, list[Run]]:
    """``rounds`` runs of each engine in turn, by depth.

    Each goes first in every other round, so that what drifts (heat, neighbours) meets both alike.
    """
    runs: dict[int, list[Run]] = {fixed_depth(e.config): [] for e in (normal, overlap)}
    for round_ in range(rounds):
        for engine in (normal, overlap) if round_ % 2 == 0 else (overlap, normal):
            run = await measure(engine, prompts, params)
            runs[run.depth].append(run)
            after_each(run)
    return runs


def fixed_depth(config: EngineConfig) -> int:
    """The depth of one side of the comparison, where ``auto`` has no place."""
    depth = config.overlap_depth
    assert isinstance(depth, int)
    return depth


def same_tokens(runs: Mapping[int, list[Run]]) -> bool:
    """Whether every run at every depth gave the same tokens."""
    return len({run.token_ids for of_depth in runs.values() for run in of_depth}) == 1
