"""One simulation: a trace, a calibration, settings, and replicas behind a router."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import NamedTuple

import msgspec

from aiosched.arguments import OF_LOADING
from aiosched.config import EngineConfig
from aiosched.engine import Engine
from aiosched.simulate.cost import Calibration, StepShape
from aiosched.simulate.device import CostedDevice, SimulatedModel
from aiosched.simulate.router import ROUTERS
from aiosched.simulate.serve import Fleet, Served
from aiosched.simulate.trace import TraceRequest
from aiosched.testing.clock import VirtualClock


class Load(NamedTuple):
    """How busy a replica was when it launched a step: requests in the step, and in the queue."""

    time: float
    running: int
    waiting: int


class ReplicaLog:
    """What one replica did. Times in virtual seconds.

    Attributes:
        steps: launched.
        busy: time that its device spent in them.
        loads: one for each step.
        retractions: times that a request lost its KV to others.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.busy = 0.0
        self.loads: list[Load] = []
        self.retractions = 0
        self._watched: tuple[Fleet, int] | None = None

    def watch(self, fleet: Fleet, index: int) -> None:
        """Log this engine of the fleet."""
        self._watched = fleet, index

    def launched(self, shape: StepShape, seconds: float) -> None:
        """Its device got a step."""
        self.steps += 1
        self.busy += seconds
        if self._watched is None:
            return
        fleet, index = self._watched
        running = shape.decode_rows + shape.prefill_rows
        waiting = 0
        if fleet.loads[index] > running:  # else all there are run, and nobody need be asked
            waiting = fleet.engines[index].stats().waiting
        self.loads.append(Load(asyncio.get_running_loop().time(), running, waiting))

    def finish(self) -> None:
        """The trace is served; the engine is about to close."""
        if self._watched is not None:
            fleet, index = self._watched
            self.retractions = fleet.engines[index].stats().retractions
            self._watched = None


class Simulation(NamedTuple):
    """What came of one run.

    Attributes:
        served: one for each request, in the order of the trace.
        replicas: one for each replica.
        seconds: virtual time from the start of the trace to the last answer.
        prompt_tokens: of all requests that were answered.
    """

    router: str
    served: Sequence[Served]
    replicas: Sequence[ReplicaLog]
    seconds: float
    prompt_tokens: int


def simulate(
    trace: Sequence[TraceRequest],
    calibration: Calibration,
    config: EngineConfig,
    *,
    replicas: int = 1,
    router: str = "round-robin",
) -> Simulation:
    """Serve ``trace`` in virtual time. The same arguments give the same result, to the bit.

    Args:
        trace: ordered by arrival.
        config: of each replica; where it leaves open how much KV memory there is, the calibration
            says.
        router: one of ``ROUTERS``.

    Raises:
        InvalidConfig: the settings do not fit what was calibrated.
    """
    return VirtualClock().run(_simulate(trace, calibration, config, replicas, router))


async def _simulate(
    trace: Sequence[TraceRequest],
    calibration: Calibration,
    config: EngineConfig,
    replicas: int,
    router: str,
) -> Simulation:
    settings = settled(config, calibration)
    logs = [ReplicaLog() for _ in range(replicas)]
    async with AsyncExitStack() as stack:
        engines = []
        for log in logs:
            device = CostedDevice(calibration.device, calibration.host, log.launched)
            model = SimulatedModel(calibration.max_model_len)
            engine = Engine(model, device=device, config=settings)
            engines.append(await stack.enter_async_context(engine))
        fleet = Fleet(engines)
        for index, log in enumerate(logs):
            log.watch(fleet, index)
        served = await fleet.serve(trace, ROUTERS[router]())
        for log in logs:
            log.finish()
    return Simulation(
        router=router,
        served=served,
        replicas=logs,
        seconds=max(answer.end for answer in served),
        prompt_tokens=sum(trace[a.index].prompt_tokens for a in served if a.error is None),
    )


def settled(config: EngineConfig, calibration: Calibration) -> EngineConfig:
    """``config`` with the memory of the machine that was measured, unless it names its own.

    Virtual time jumps from step to step, so no step can be late: the watchdog has no part here.
    """
    changes: dict[str, object] = {"step_timeout": 1e9, **OF_LOADING}
    if config.kv_tokens is None:
        changes["kv_tokens"] = calibration.kv_tokens
    return msgspec.structs.replace(config, **changes)
