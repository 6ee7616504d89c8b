"""A short trace that a model serves and a simulation, too, and how far the two are apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from aiosched.bench.measure import Spread
from aiosched.simulate.cost import StepCost, StepShape
from aiosched.simulate.generate import generate
from aiosched.simulate.serve import Served
from aiosched.simulate.trace import TraceRequest
from aiosched.simulate.workload import Workload

CHECK_CONCURRENCY = 4.0
"""Requests that the trace of ``--check`` keeps running, about: a load under which every kind of
step occurs, and far from the edge at which a little more work makes an ever longer queue."""


def check_trace(
    device: StepCost, requests: int, seed: int, longest: int = 2**31
) -> list[TraceRequest]:
    """Poisson arrivals of short prompts, about ``CHECK_CONCURRENCY`` of them at once.

    ``longest``: prompt and answer, in tokens.
    """
    prompts, outputs = (
        (min(low, longest // 2), min(high, longest // 2)) for low, high in ((32, 256), (16, 96))
    )
    batch = int(CHECK_CONCURRENCY)
    prompt, output = sum(prompts) // 2, sum(outputs) // 2
    kv = prompt + output // 2
    decode = StepShape(batch, batch * kv, batch * kv)
    prefill = StepShape(0, 0, 0, 1, prompt, prompt * (prompt + 1) // 2)
    # While a request is there, so are others, whose prompts are read in beside its own.
    seconds = output * device.seconds(decode)
    seconds += batch * device.seconds(prefill)
    workload = Workload(
        rate=CHECK_CONCURRENCY / seconds,
        requests=requests,
        seed=seed,
        prompt_tokens=prompts,
        output_tokens=outputs,
    )
    return generate(workload)


def comparison(
    real: Sequence[Sequence[Served]], simulated: Sequence[Served]
) -> list[Mapping[str, Any]]:
    """A row for each mean: measured (median of the rounds, with their range), and simulated."""
    rows: list[Mapping[str, Any]] = []
    for name, mean in (("ttft_ms", _mean_ttft), ("tpot_ms", _mean_tpot), ("e2e_ms", _mean_e2e)):
        measured = Spread.of([1e3 * mean(answers) for answers in real])
        value = 1e3 * mean(simulated)
        rows.append(
            {
                "mean": name,
                "real": measured.median,
                "real_low": measured.low,
                "real_high": measured.high,
                "simulated": value,
                "difference": f"{value / measured.median - 1:+.1%}",
            }
        )
    return rows


def _mean_ttft(answers: Sequence[Served]) -> float:
    return float(np.mean([a.ttft for a in answers if a.ttft is not None]))


def _mean_tpot(answers: Sequence[Served]) -> float:
    return float(np.mean([a.tpot for a in answers if a.tpot is not None]))


def _mean_e2e(answers: Sequence[Served]) -> float:
    return float(np.mean([a.e2e for a in answers if a.error is None]))
