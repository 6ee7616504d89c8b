"""``aiosched bench calibrate``: the cost model of ``aiosched simulate``, fitted on this machine.

Clients that send one request after another keep the batch at a size, for several sizes, with
prompts and answers of all lengths, so that there are steps of every kind: those that decode, those
that read prompts, and those that do both. Their times are fitted by what is in them.

``--check`` serves a short trace on the model, in between, and then in the simulation, and compares
the two. The steps of that trace are not fitted to.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import msgspec

from aiosched.bench.calibration_run import measure
from aiosched.bench.clients import ClientLoad
from aiosched.bench.live_and_simulated import comparison
from aiosched.bench.measure import watching_others
from aiosched.bench.report import Report
from aiosched.commands.options import engine_config, engine_options, overlap_option
from aiosched.commands.out_file import OutFile
from aiosched.commands.plug import Plug, pass_plug
from aiosched.commands.running import run
from aiosched.simulate.cost import LINEAR, Calibration, StepCost
from aiosched.simulate.run import simulate

BATCHES = (1, 2, 4, 8, 16, 32)


@click.command("calibrate", short_help="Fit the cost model of `aiosched simulate`.")
@click.option(
    "--out", type=OutFile(), default=Path("calibration.json"),
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


def terms(calibration: Calibration) -> list[Mapping[str, Any]]:
    """A row for each number of the costs, in microseconds: points of curves, then units."""
    rows: list[Mapping[str, Any]] = []
    for side in ("device", "host"):
        cost: StepCost = getattr(calibration, side)
        for curve, unit in ((cost.rows, "rows decode"), (cost.prompt_tokens, "prompt tokens")):
            rows += [{"of": side, "term": f"{n} {unit}", "us": 1e6 * us} for n, us in curve]
        rows += [{"of": side, "term": term, "us": 1e6 * getattr(cost, term)} for term in LINEAR]
    return rows


def _fitted(side: str, calibration: Calibration) -> str:
    fit = calibration.device_fit if side == "device" else calibration.host_fit
    return (
        f"{side}: {fit.steps:,} steps of {fit.mean_ms:.2f} ms on average; the fit misses a step by "
        f"{fit.error_median:.1%} at the median, {fit.error_p90:.1%} at the 90th percentile."
    )
