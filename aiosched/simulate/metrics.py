"""What a simulation comes to: latencies, goodput at an SLO, throughput, load."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from aiosched.errors import InvalidConfig
from aiosched.simulate.run import ReplicaLog, Simulation
from aiosched.simulate.serve import Served

PERCENTILES = (50, 90, 99)


class Slo(msgspec.Struct, frozen=True, kw_only=True):
    """A service-level objective: what a request must keep to count as good. In seconds."""

    ttft: float = 1.0
    tpot: float = 0.1

    def __post_init__(self) -> None:
        for field in ("ttft", "tpot"):
            if not 0 < getattr(self, field) < math.inf:
                raise InvalidConfig(f"slo_{field}", getattr(self, field), "seconds above 0")

    def kept(self, answer: Served) -> bool:
        """Whether an answer came in full, began in time and went on in time."""
        return (
            answer.error is None
            and answer.ttft is not None
            and answer.ttft <= self.ttft
            and (answer.tpot is None or answer.tpot <= self.tpot)
        )


def summary(simulation: Simulation, slo: Slo) -> dict[str, Any]:
    """One row: everything about a run in numbers. ``None`` where no request says anything, and
    for whatever is over time in a run that took none.

    Keys: ``ttft_ms``, ``tpot_ms`` and ``e2e_s``, each with ``_mean`` and the percentiles ``_p50``,
    ``_p90`` and ``_p99``; ``goodput`` and ``throughput`` in requests a second, the former of those
    that kept the SLO; ``output_tok_s``; ``utilisation``, the share of the time that devices were
    busy; ``queue_mean``, requests that waited to be admitted, over time and over all replicas,
    ``queue_max``, the most of them at one replica, and ``queue_s``, how long a request waited;
    ``cached_share`` of prompt tokens were found in prefix caches.
    """
    served, seconds = simulation.served, simulation.seconds
    done = [answer for answer in served if answer.error is None]
    kept = sum(slo.kept(answer) for answer in done)
    queue = _queue_seconds(simulation)
    return {
        "router": simulation.router,
        "replicas": len(simulation.replicas),
        "requests": len(served),
        "failed": len(served) - len(done),
        "seconds": seconds,
        **_spread("ttft_ms", [1e3 * a.ttft for a in done if a.ttft is not None]),
        **_spread("tpot_ms", [1e3 * a.tpot for a in done if a.tpot is not None]),
        **_spread("e2e_s", [a.e2e for a in done]),
        "slo_ttft_ms": 1e3 * slo.ttft,
        "slo_tpot_ms": 1e3 * slo.tpot,
        "slo_share": kept / len(served),
        "goodput": _over(kept, seconds),
        "throughput": _over(len(done), seconds),
        "output_tok_s": _over(sum(a.tokens for a in done), seconds),
        "utilisation": _over(
            sum(r.busy for r in simulation.replicas) / len(simulation.replicas), seconds
        ),
        "queue_mean": _over(queue, seconds),
        "queue_max": max(max((x.waiting for x in r.loads), default=0) for r in simulation.replicas),
        "queue_s": queue / len(served),
        "cached_share": sum(a.cached_tokens for a in done) / max(1, simulation.prompt_tokens),
        "retractions": sum(log.retractions for log in simulation.replicas),
        "steps": sum(log.steps for log in simulation.replicas),
    }


def over_time(log: ReplicaLog, field: str, edges: NDArray[np.float64]) -> NDArray[np.float64]:
    """The mean of ``running`` or ``waiting`` between each two ``edges`` (seconds, ascending).

    What was so at the launch of a step holds until the next; a replica that launches nothing any
    more has nobody left.
    """
    if not log.loads:
        return np.zeros(len(edges) - 1)
    times = np.array([load.time for load in log.loads])
    values = np.array([getattr(load, field) for load in log.loads], dtype=np.float64)
    area = np.concatenate([[0.0], np.cumsum(values[:-1] * np.diff(times))])
    means: NDArray[np.float64] = np.diff(np.interp(edges, times, area)) / np.diff(edges)
    return means


def _queue_seconds(simulation: Simulation) -> float:
    """Seconds in the queue, summed over all requests: the area under its length (Little's law)."""
    edges = np.array([0.0, simulation.seconds])
    logs = simulation.replicas
    if not simulation.seconds:
        return 0.0
    return sum(float(over_time(log, "waiting", edges)[0]) for log in logs) * simulation.seconds


def _over(amount: float, seconds: float) -> float | None:
    return amount / seconds if seconds else None


def _spread(name: str, values: Sequence[float]) -> dict[str, float | None]:
    spread: dict[str, float | None] = {
        f"{name}_mean": float(np.mean(values)) if values else None,
    }
    for percentile in PERCENTILES:
        value = float(np.percentile(values, percentile)) if values else None
        spread[f"{name}_p{percentile}"] = value
    return spread
