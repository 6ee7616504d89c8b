"""Traces made up: Poisson, bursty and diurnal arrivals, with lengths and shared prefixes.

Only ``Generator.random`` is drawn from, the one method whose stream numpy keeps for good; every
other distribution is computed from it. So a seed names one trace.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from aiosched.errors import InvalidConfig
from aiosched.simulate.trace import MAX_ARRIVAL, TraceRequest
from aiosched.simulate.workload import BURST, BURST_SHARE, Workload


def generate(workload: Workload) -> list[TraceRequest]:
    """The trace that ``workload`` describes; the same for the same seed.

    Arrivals, lengths and prefixes come from streams of their own, so that another kind of
    arrivals brings the same requests.

    Raises:
        InvalidConfig: the rate is so low that the trace would go on beyond ``MAX_ARRIVAL``.
    """
    arrivals_seed, lengths_seed, prefix_seed = np.random.SeedSequence(workload.seed).spawn(3)
    arrivals = _ARRIVALS[workload.kind](workload, np.random.default_rng(arrivals_seed))
    lengths = np.random.default_rng(lengths_seed).random((workload.requests, 2))
    prefixes = np.random.default_rng(prefix_seed).random(workload.requests)
    trace = []
    for (for_prompt, for_output), for_prefix in zip(
        lengths.tolist(), prefixes.tolist(), strict=True
    ):
        arrival = next(arrivals)
        if arrival > MAX_ARRIVAL:
            bound = f"higher: {workload.requests} requests take more than {MAX_ARRIVAL:g} s"
            raise InvalidConfig("rate", workload.rate, bound)
        prefix_id, shared = None, 0
        if workload.prefixes:
            prefix_id = f"prefix-{int(for_prefix * workload.prefixes)}"
            shared = workload.prefix_tokens
        trace.append(
            TraceRequest(
                arrival=arrival,
                prompt_tokens=shared + _between(workload.prompt_tokens, for_prompt),
                output_tokens=_between(workload.output_tokens, for_output),
                prefix_id=prefix_id,
                prefix_tokens=shared,
            )
        )
    return trace


def _between(bounds: tuple[int, int], draw: float) -> int:
    low, high = bounds
    return low + int(draw * (high - low + 1))


def _exponential(rng: np.random.Generator) -> float:
    """A waiting time of mean 1."""
    return -math.log1p(-rng.random())


def _poisson(workload: Workload, rng: np.random.Generator) -> Iterator[float]:
    now = 0.0
    while True:
        now += _exponential(rng) / workload.rate
        yield now


def _bursty(workload: Workload, rng: np.random.Generator) -> Iterator[float]:
    calm_rate = workload.rate * (1 - BURST * BURST_SHARE) / (1 - BURST_SHARE)
    calm_seconds = workload.burst_seconds * (1 - BURST_SHARE) / BURST_SHARE
    phases = ((calm_rate, calm_seconds), (BURST * workload.rate, workload.burst_seconds))
    now, phase = 0.0, int(rng.random() < BURST_SHARE)
    while True:
        rate, seconds = phases[phase]
        end = now + _exponential(rng) * seconds
        while (now := now + _exponential(rng) / rate) < end:
            yield now
        now, phase = end, 1 - phase  # what is left of the last wait means nothing: memoryless


def _diurnal(workload: Workload, rng: np.random.Generator) -> Iterator[float]:
    """By thinning: arrivals at the highest rate, kept with the share that the hour has of it."""
    now, highest = 0.0, 1 + workload.swing
    while True:
        now += _exponential(rng) / (workload.rate * highest)
        here = 1 - workload.swing * math.cos(2 * math.pi * now / workload.period)
        if rng.random() * highest < here:
            yield now


_ARRIVALS = {"poisson": _poisson, "bursty": _bursty, "diurnal": _diurnal}
