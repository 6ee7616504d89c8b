"""``aiosched bench calibrate``: the cost model of ``aiosched simulate``, fitted on this machine.

Clients that send one request after another keep the batch at a size, for several sizes, with
prompts and answers of all lengths, so that there are steps of every kind: those that decode, those
that read prompts, and those that do both. Their times are fitted by what is in them.

``--check`` serves a short trace on the model, in between, and then in the simulation, and compares
the two. The steps of that trace are not fitted to.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click
import msgspec
import numpy as np

from aiosched.bench.measure import Spread, watching_others
from aiosched.bench.report import Report, this_machine, versions
from aiosched.cli.options import engine_config, engine_options, overlap_option
from aiosched.cli.plug import Plug, pass_plug
from aiosched.cli.running import run
from aiosched.config import EngineConfig
from aiosched.engine import Engine
from aiosched.model.inputs import Model
from aiosched.params import SamplingParams
from aiosched.runtime import device_kind, make_device
from aiosched.simulate.cost import LINEAR, Calibration, Fit, StepCost, StepShape
from aiosched.simulate.fit import fit_cost
from aiosched.simulate.generate import generate
from aiosched.simulate.measured import MeasuredDevice, MeasuredStep
from aiosched.simulate.router import RoundRobin
from aiosched.simulate.run import simulate
from aiosched.simulate.serve import Fleet, Served
from aiosched.simulate.trace import TraceRequest
from aiosched.simulate.workload import Workload

BATCHES = (1, 2, 4, 8, 16, 32)
PROMPTS = (8, 1024)  # tokens, least and most; as many between 8 and 16 as between 512 and 1024
OUTPUTS = (8, 128)

HOST_TERMS = ("prefill_rows",)
"""What the host's time depends on beside the rows that decode and the tokens that are read."""

CHECK_CONCURRENCY = 4.0
"""Requests that the trace of ``--check`` keeps running, about: a load under which every kind of
step occurs, and far from the edge at which a little more work makes an ever longer queue."""


@click.command("calibrate", short_help="Fit the cost model of `aiosched simulate`.")
@click.option(
    "--out", type=click.Path(dir_okay=False, path_type=Path), default=Path("calibration.json"),
    show_default=True, help="Where to write it.",
)  # fmt: skip
@click.option(
    "--batch", "batches", type=click.IntRange(1, 1024), multiple=True, default=BATCHES,
    show_default=True, help="Clients at once. May be given several times.",
)  # fmt: skip
@click.option("--seconds", type=click.FloatRange(0, min_open=True), default=4.0, show_default=True,
              help="For each batch: clients begin no request after that.")  # fmt: skip
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@click.option("--check", is_flag=True, help="Compare a real and a simulated run of a trace.")
@click.option("--requests", type=click.IntRange(2), default=40, show_default=True,
              help="In the trace of --check.")  # fmt: skip
@click.option("--rounds", type=click.IntRange(1), default=2, show_default=True,
              help="Times that all of this is done, in turn.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@overlap_option
@engine_options
@pass_plug
def command(
    plug: Plug,
    /,
    out: Path,
    batches: tuple[int, ...],
    seconds: float,
    seed: int,
    check: bool,
    requests: int,
    rounds: int,
    as_json: bool,
    **flags: Any,
) -> None:
    """Fit the cost model of `aiosched simulate` on this machine, with your model and settings.

    Writes a file for `aiosched simulate --calibration FILE`. Run it on a machine that does nothing
    else. Depth auto is measured at depth 1: at a depth that changes, nobody knows what it was.
    """
    config = engine_config(flags)
    if config.overlap_depth == "auto":
        config = msgspec.structs.replace(config, overlap_depth=1)
    load = ClientLoad(batches=batches, seconds=seconds / rounds, rounds=rounds, seed=seed)
    with watching_others() as others:
        measured = run(measure(plug.model, config, load, requests if check else 0))
        calibration = measured.calibration
        calibration.write(out)
        rows = terms(calibration)
        if check:
            simulated = simulate(measured.trace, calibration, config).served
            rows = comparison(measured.real, simulated)
    notes = [_fitted("device", calibration), _fitted("host", calibration), f"Wrote {out}."]
    if not others.quiet:
        notes.append(f"Others used {others.cores:.2f} cores meanwhile: measure again.")
    settings = msgspec.to_builtins(load) | {"model": config.model}
    if check:
        settings["requests"] = requests
    Report.of("calibrate", rows, settings=settings, notes=notes).show(as_json)


class ClientLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine is measured under.

    Attributes:
        batches: how many clients there are at once, one number after another.
        seconds: for each number in each round; a request that was begun by then is finished.
    """

    batches: tuple[int, ...]
    seconds: float
    rounds: int = 1
    seed: int = 0


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
        await _clients(engine, min(4, *load.batches), 0.0, (load.seed, 0))  # to warm up
        device.take()
        fleet = Fleet([engine], token_by_token=True)
        for number in range(load.rounds):
            for batch in load.batches:
                await _clients(engine, batch, load.seconds, (load.seed, number, batch))
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


async def _clients(engine: Engine, count: int, seconds: float, seed: tuple[int, ...]) -> None:
    """``count`` clients send one request after another; each sends one at least."""
    loop = asyncio.get_running_loop()
    until = loop.time() + seconds

    async def client(number: int) -> None:
        draw = np.random.default_rng((*seed, number))
        while True:
            room = max_model_len(engine) // 2
            prompt_tokens, max_tokens = (
                min(int(low * (high / low) ** draw.random()), room)
                for low, high in (PROMPTS, OUTPUTS)
            )
            prompt = draw.integers(0, engine.model.vocab_size, prompt_tokens)
            params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
            async for _ in engine.generate(prompt, params):
                pass
            if loop.time() >= until:
                return

    await asyncio.gather(*(client(number) for number in range(count)))


def max_model_len(engine: Engine) -> int:
    """The longest sequence that an open engine takes, in tokens."""
    return min(engine.model.max_model_len, engine.config.max_model_len or 2**31)


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


def terms(calibration: Calibration) -> list[Mapping[str, Any]]:
    """A row for each number of the costs, in microseconds: points of curves, then units."""
    rows: list[Mapping[str, Any]] = []
    for side in ("device", "host"):
        cost: StepCost = getattr(calibration, side)
        for curve, unit in ((cost.rows, "rows decode"), (cost.prompt_tokens, "prompt tokens")):
            rows += [{"of": side, "term": f"{n} {unit}", "us": 1e6 * us} for n, us in curve]
        rows += [{"of": side, "term": term, "us": 1e6 * getattr(cost, term)} for term in LINEAR]
    return rows


def _mean_ttft(answers: Sequence[Served]) -> float:
    return float(np.mean([a.ttft for a in answers if a.ttft is not None]))


def _mean_tpot(answers: Sequence[Served]) -> float:
    return float(np.mean([a.tpot for a in answers if a.tpot is not None]))


def _mean_e2e(answers: Sequence[Served]) -> float:
    return float(np.mean([a.e2e for a in answers if a.error is None]))


def _fitted(side: str, calibration: Calibration) -> str:
    fit = calibration.device_fit if side == "device" else calibration.host_fit
    return (
        f"{side}: {fit.steps:,} steps of {fit.mean_ms:.2f} ms on average; the fit misses a step by "
        f"{fit.error_median:.1%} at the median, {fit.error_p90:.1%} at the 90th percentile."
    )
