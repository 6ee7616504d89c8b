"""``aiosched simulate``: a trace served in virtual time, as a table, JSON and a picture."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
import msgspec
from click.core import ParameterSource

from aiosched.commands.options import engine_config, overlap_option
from aiosched.commands.out_file import OutFile
from aiosched.config import POLICIES
from aiosched.simulate.router import ROUTERS
from aiosched.simulate.workload import KINDS, Workload

if TYPE_CHECKING:
    from aiosched.config import EngineConfig
    from aiosched.simulate.cost import Calibration
    from aiosched.simulate.trace import TraceRequest

Command = TypeVar("Command", bound=Callable[..., Any])


def _bounds(
    ctx: click.Context, param: click.Parameter, value: str | None
) -> tuple[int, int] | None:
    """``LOW-HIGH``, or one number for both."""
    if value is None:
        return None
    low, dash, high = value.partition("-")
    # Thousands of digits are more than Python reads.
    if not low.isdecimal() or (dash and not high.isdecimal()) or len(value) > 100:
        raise click.BadParameter(f"{value[:100]!r} is not LOW-HIGH, as in 32-512")
    return int(low), int(high) if dash else int(low)


def workload_options(command: Command) -> Command:
    """What ``--generate`` makes: the fields of ``Workload``, with its defaults."""
    of = Workload()
    for option in (
        click.option("--rate", type=float, help=f"Mean arrivals a second.  [default: {of.rate:g}]"),
        click.option("--requests", type=int, help=f"How many.  [default: {of.requests}]"),
        click.option("--seed", type=int, help="Same seed, same trace.  [default: 0]"),
        click.option(
            "--prompt-tokens",
            metavar="LOW-HIGH",
            callback=_bounds,
            help="Of a prompt, uniform.  [default: 32-512]",
        ),
        click.option(
            "--output-tokens",
            metavar="LOW-HIGH",
            callback=_bounds,
            help="Of an answer, uniform.  [default: 16-256]",
        ),
        click.option("--prefixes", type=int, help="Different shared prefixes.  [default: 0]"),
        click.option(
            "--prefix-tokens",
            type=int,
            help="Length of each, before the prompt.  [default: 256]",
        ),
        click.option(
            "--burst-seconds", type=float, help="Mean length of a burst (bursty).  [default: 5]"
        ),
        click.option("--period", type=float, help="Seconds of a day (diurnal).  [default: 86400]"),
        click.option(
            "--swing",
            type=float,
            help="How far the rate leaves its mean (diurnal), as a share.  [default: 0.8]",
        ),
    )[::-1]:
        command = option(command)
    return command


def replica_options(command: Command) -> Command:
    """The settings of an engine that matter to a simulated one."""
    for option in (
        click.option(
            "--config",
            "config_file",
            type=click.Path(exists=True, dir_okay=False, path_type=Path),
            help="TOML file with fields of EngineConfig.",
        ),
        overlap_option,
        click.option("--kv-tokens", type=int, help="Tokens that the KV cache holds."),
        click.option("--page-size", type=int, help="Tokens in a KV page."),
        click.option("--prefix-cache/--no-prefix-cache", default=None, help="Share prefixes' KV."),
        click.option("--prefill-chunk-tokens", type=int, help="Prompt tokens in one step."),
        click.option("--max-batch-tokens", type=int, help="Tokens in one step, decodes included."),
        click.option("--max-running-requests", type=int, help="Requests in the batches at once."),
        click.option("--max-queued-requests", type=int, help="Requests that may wait."),
        click.option("--max-model-len", type=int, help="Longest prompt and answer, in tokens."),
        click.option("--policy", metavar="POLICY", help=f"{' or '.join(POLICIES)}."),
        click.option(
            "--disable-consecutive-prefill-overlap/--enable-consecutive-prefill-overlap",
            default=None,
            help="Collect a prefill before the next is launched.",
        ),
    )[::-1]:
        command = option(command)
    return command


@click.command(short_help="A trace of requests on simulated replicas, in virtual time.")
@click.argument(
    "trace", required=False, type=click.Path(exists=True, dir_okay=False, path_type=Path)
)
@click.option(
    "--generate", "kind", type=click.Choice(KINDS), help="Make a trace instead of reading one."
)
@click.option(
    "--out",
    type=OutFile(),
    help="Write the generated trace here, and simulate nothing.",
)
@workload_options
@click.option(
    "--calibration",
    "calibration_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="From `aiosched bench calibrate`.  [default: the one that comes with aiosched]",
)
@click.option("--replicas", type=click.IntRange(1), default=1, show_default=True)
@click.option(
    "--router",
    "routers",
    type=click.Choice([*ROUTERS, "all"]),
    multiple=True,
    help="Repeatable: one run each.  [default: round-robin; all, with several replicas]",
)
@click.option(
    "--slo-ttft",
    type=float,
    default=1000.0,
    show_default=True,
    metavar="MS",
    help="Time to first token that a good request keeps.",
)
@click.option(
    "--slo-tpot",
    type=float,
    default=100.0,
    show_default=True,
    metavar="MS",
    help="Time per output token that it keeps.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--plot", type=OutFile(), help="Draw latencies and load, as .svg or .html.")
@replica_options
@click.pass_context
def simulate(
    ctx: click.Context,
    /,
    trace: Path | None,
    kind: str | None,
    out: Path | None,
    calibration_file: Path | None,
    replicas: int,
    routers: tuple[str, ...],
    slo_ttft: float,
    slo_tpot: float,
    as_json: bool,
    plot: Path | None,
    **flags: Any,
) -> None:
    """Serve a trace of requests on simulated replicas, in virtual time.

    The engine and its scheduler are the real ones; steps take as long as a cost model says that
    `aiosched bench calibrate` measured. The same trace and settings give the same figures.

    TRACE has one JSON object a line, with the keys arrival (seconds), prompt_tokens and
    output_tokens, and prefix_id and prefix_tokens where prompts begin alike.

    \b
    Examples:
      aiosched simulate --generate poisson --rate 0.5
      aiosched simulate --generate bursty --rate 2 --prefixes 16 --out trace.jsonl
      aiosched simulate trace.jsonl --replicas 4 --plot trace.svg
    """
    workload = {name: flags.pop(name) for name in Workload.__struct_fields__ if name in flags}
    given = {name: value for name, value in workload.items() if value is not None}
    if (trace is None) == (kind is None):
        raise click.UsageError("give a TRACE, or --generate one")
    if kind is None and (given or out is not None):
        name = next(iter([*given, "out"])).replace("_", "-")
        raise click.UsageError(f"--{name} goes with --generate")
    _refuse_idle(kind, given)
    if out is not None:
        assert kind is not None
        _refuse_beside_out(ctx)
        _write(out, Workload(kind=kind, **given))
        return
    if trace is not None:
        from aiosched.simulate.trace import read_trace

        requests, source = read_trace(trace), {"trace": trace.name}
    else:
        from aiosched.simulate.generate import generate

        assert kind is not None
        wanted = Workload(kind=kind, **given)
        requests, source = generate(wanted), msgspec.to_builtins(wanted)
    if not routers:
        routers = ("all",) if replicas > 1 else ("round-robin",)
    chosen = tuple(ROUTERS) if "all" in routers else tuple(dict.fromkeys(routers))
    slo = {"ttft": slo_ttft / 1e3, "tpot": slo_tpot / 1e3}
    _run(
        requests, source, _calibration(calibration_file), engine_config(flags),
        replicas, chosen, slo, as_json, plot,
    )  # fmt: skip


def _refuse_idle(kind: str | None, given: dict[str, Any]) -> None:
    """Refuse what the arrivals that are wanted have no use for."""
    for name, only in (("burst_seconds", "bursty"), ("period", "diurnal"), ("swing", "diurnal")):
        if name in given and kind != only:
            raise click.UsageError(f"--{name.replace('_', '-')} goes with --generate {only}")
    if "prefix_tokens" in given and not given.get("prefixes"):
        raise click.UsageError("--prefix-tokens goes with --prefixes, of which there are none")


def _refuse_beside_out(ctx: click.Context) -> None:
    """Refuse what shapes a simulation, for there will be none."""
    of_traces = {"kind", "out", *Workload.__struct_fields__}
    for param in ctx.command.params:
        name = param.name or ""
        if name not in of_traces and ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise click.UsageError(
                f"{param.opts[0]} is for a simulation: --out only writes a trace"
            )


def _write(out: Path, workload: Workload) -> None:
    from aiosched.simulate.generate import generate
    from aiosched.simulate.trace import duration, write_trace

    requests = generate(workload)
    write_trace(out, requests)
    click.echo(f"{len(requests):,} requests over {duration(requests):,.0f} s: {out}", err=True)


def _calibration(path: Path | None) -> Calibration:
    from aiosched.simulate.cost import Calibration

    return Calibration.recorded() if path is None else Calibration.read(path)


def _run(
    requests: list[TraceRequest],
    source: dict[str, Any],
    calibration: Calibration,
    config: EngineConfig,
    replicas: int,
    routers: tuple[str, ...],
    objective: dict[str, float],
    as_json: bool,
    plot: Path | None,
) -> None:
    from aiosched.simulate.metrics import Slo, summary
    from aiosched.simulate.plot import check_plot, save_plot
    from aiosched.simulate.report import SimulationReport
    from aiosched.simulate.run import settled, simulate

    slo = Slo(**objective)
    if plot is not None:
        check_plot(plot)
    runs = [
        simulate(requests, calibration, config, replicas=replicas, router=router)
        for router in routers
    ]
    settings = source | {
        "engine": {name: getattr(settled(config, calibration), name) for name in _SHOWN}
    }
    report = SimulationReport.of(calibration, settings, [summary(run, slo) for run in runs])
    report.show(as_json)
    if plot is not None:
        title = f"{len(requests):,} requests, replicas: {replicas}"
        save_plot(plot, runs, slo, title)


_SHOWN = (
    "overlap_depth",
    "kv_tokens",
    "page_size",
    "prefix_cache",
    "prefill_chunk_tokens",
    "max_batch_tokens",
    "max_running_requests",
    "max_queued_requests",
    "max_model_len",
    "policy",
    "disable_consecutive_prefill_overlap",
)
"""Settings that shape a simulation."""
