"""A simulation as a picture: latencies against the SLO, and load over time."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

import numpy as np

from aiosched.errors import InvalidConfig
from aiosched.simulate.chart import Line, Panel, draw
from aiosched.simulate.metrics import Slo, over_time
from aiosched.simulate.run import Simulation

FORMATS = (".svg", ".html")
POINTS = 200
"""Points of a line: more than there are pixels for is of no use to anybody."""


def check_plot(path: Path) -> None:
    """Refuse a file that ``save_plot`` cannot write, before anything is computed.

    Raises:
        InvalidConfig: its name ends in none of ``FORMATS``.
    """
    if path.suffix.lower() not in FORMATS:
        raise InvalidConfig("plot", str(path), f"a file whose name ends in {' or '.join(FORMATS)}")


def save_plot(path: Path, simulations: Sequence[Simulation], slo: Slo, title: str) -> None:
    """Draw the runs, one line each, and write them as SVG or as a page that holds it.

    Raises:
        InvalidConfig: see ``check_plot``.
        OSError: the file cannot be written.
    """
    check_plot(path)
    picture = draw(panels(simulations, slo), title)
    if path.suffix.lower() == ".html":
        head = f'<!doctype html>\n<meta charset="utf-8">\n<title>{escape(title)}</title>\n'
        picture = f'{head}<meta name="color-scheme" content="light dark">\n{picture}'
    path.write_text(picture, encoding="utf-8")


def panels(simulations: Sequence[Simulation], slo: Slo) -> list[Panel]:
    """Four charts with a line for each run, in the same order in all of them."""
    done = [[a for a in run.served if a.error is None] for run in simulations]
    ttft = [[1e3 * a.ttft for a in answers if a.ttft is not None] for answers in done]
    tpot = [[1e3 * a.tpot for a in answers if a.tpot is not None] for answers in done]
    names = [run.router for run in simulations]
    return [
        _shares("Time to first token", names, ttft, 1e3 * slo.ttft),
        _shares("Time per output token", names, tpot, 1e3 * slo.tpot),
        _loads("Requests in the queue", simulations, "waiting"),
        _loads("Requests in a step", simulations, "running"),
    ]


def _shares(
    title: str, names: Sequence[str], runs: Sequence[Sequence[float]], limit: float
) -> Panel:
    """Which share of the requests took at most so long."""
    shares = np.linspace(0, 100, POINTS)
    lines = []
    for name, values in zip(names, runs, strict=True):
        if not values:
            lines.append(Line(name, ()))
            continue
        quantiles = np.maximum(np.percentile(values, shares), 1e-3)  # the scale is logarithmic
        lines.append(Line(name, list(zip(quantiles.tolist(), shares.tolist(), strict=True))))
    return Panel(title, "ms", "% of requests", lines, limit, log_x=True, top=100.0)


def _loads(title: str, simulations: Sequence[Simulation], field: str) -> Panel:
    lines = []
    for run in simulations:
        if not run.seconds:
            lines.append(Line(run.router, ()))
            continue
        edges = np.linspace(0, run.seconds, POINTS + 1)
        total = np.sum([over_time(log, field, edges) for log in run.replicas], axis=0)
        middles = (edges[:-1] + edges[1:]) / 2
        lines.append(Line(run.router, list(zip(middles.tolist(), total.tolist(), strict=True))))
    return Panel(title, "seconds", "over all replicas", lines)
