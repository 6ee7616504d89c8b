"""From an engine under load to a calibration: measured steps, and the costs fitted to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from aiosched.bench.clients import ClientLoad, max_model_len, run_clients
from aiosched.bench.live_and_simulated import check_trace
from aiosched.bench.report import this_machine, versions
from aiosched.config import EngineConfig
from aiosched.engine import Engine
from aiosched.model.inputs import Model
from aiosched.runtime import device_kind, make_device
from aiosched.simulate.cost import Calibration, Fit, StepCost
from aiosched.simulate.fit import fit_cost
from aiosched.simulate.measured import MeasuredDevice, MeasuredStep
from aiosched.simulate.router import RoundRobin
from aiosched.simulate.serve import Fleet, Served
from aiosched.simulate.trace import TraceRequest

HOST_TERMS = ("prefill_rows",)
"""What the host's time depends on beside the rows that decode and the tokens that are read."""


class Measured(NamedTuple):
    """What came of it.

    Attributes:
        trace: of the check; empty if there was none.
        real: how the model served it, once a round.
    """

    calibration: Calibration
    trace: Sequence[TraceRequest]
    real: Sequence[Sequence[Served]]


async def measure(
    model: Model | None, config: EngineConfig, load: ClientLoad, requests: int = 0
) -> Measured:
    """Run the clients, and fit a calibration to the steps that came of them.

    Args:
        model: in place of the one that ``config`` names.
        requests: of a trace that is served after the clients of each round; 0: none.

    Raises:
        ValueError: there were too few steps to fit anything.
    """
    device = MeasuredDevice(make_device(device_kind(config.device), config))
    steps: list[MeasuredStep] = []
    trace: list[TraceRequest] = []
    real: list[list[Served]] = []
    async with Engine(model, device=device, config=config) as engine:
        await run_clients(engine, min(4, *load.batches), 0.0, (load.seed, 0))  # to warm up
        device.take()
        fleet = Fleet([engine], token_by_token=True)
        for number in range(load.rounds):
            for batch in load.batches:
                await run_clients(engine, batch, load.seconds, (load.seed, number, batch))
            steps += device.take()
            if requests:
                cost = fit_device(steps)[0]
                trace = trace or check_trace(cost, requests, load.seed, max_model_len(engine))
                real.append(await fleet.serve(trace, RoundRobin(), seed=number))
                device.take()
        calibration = _calibration(engine, model, load, steps)
    return Measured(calibration, trace, real)


def _calibration(
    engine: Engine, plugged: Model | None, load: ClientLoad, steps: Sequence[MeasuredStep]
) -> Calibration:
    config = engine.config
    device_cost, device_fit = fit_device(steps)
    told = [(step.shape, step.host) for step in steps if step.host is not None]
    host_cost, host_fit = fit_cost(
        [shape for shape, _ in told], [host for _, host in told], growth=8, linear=HOST_TERMS
    )
    return Calibration(
        model=config.model if plugged is None else type(plugged).__name__,
        dtype=str(getattr(engine.model, "dtype", config.dtype)).removeprefix("torch."),
        overlap_depth=config.overlap_depth,
        kv_tokens=engine.stats().kv_pages_total * config.page_size,
        max_model_len=max_model_len(engine),
        machine=msgspec.to_builtins(this_machine()),
        versions=versions(),
        settings=msgspec.to_builtins(load),
        device=device_cost,
        host=host_cost,
        device_fit=device_fit,
        host_fit=host_fit,
    )


def fit_device(steps: Sequence[MeasuredStep]) -> tuple[StepCost, Fit]:
    """What the device takes for a step, and how well that is known."""
    return fit_cost([step.shape for step in steps], [step.device for step in steps])
