"""Line charts as SVG: axes, ticks, lines and a legend, and nothing else."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import NamedTuple

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Told apart by everybody, on white and on black (after Okabe and Ito)."""

WIDTH, HEIGHT = 460, 280
LEFT, RIGHT, TOP, BOTTOM = 58, 28, 40, 44

STYLE = """
.chart { --ink: #24292f; --faint: #d8dee4; --ground: #ffffff; background: var(--ground); }
@media (prefers-color-scheme: dark) {
  .chart { --ink: #e6edf3; --faint: #30363d; --ground: #0d1117; }
}
.chart text { font: 12px system-ui, sans-serif; fill: var(--ink); }
.chart .title { font-size: 14px; font-weight: 600; }
.chart .ground { fill: var(--ground); }
.chart .grid { stroke: var(--faint); stroke-width: 1; }
.chart .limit { stroke: var(--ink); stroke-width: 1; stroke-dasharray: 4 4; }
.chart .line { fill: none; stroke-width: 2; stroke-linejoin: round; }
"""


class Line(NamedTuple):
    """A line of a panel: its name for the legend, and its points."""

    name: str
    points: Sequence[tuple[float, float]]


class Panel(NamedTuple):
    """One chart.

    Attributes:
        limit: an x at which a dashed line stands; ``None``: no line.
        log_x: whether x is drawn to a logarithmic scale. It must be above 0 then.
        top: the highest y; ``None``: that of the points.
    """

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    limit: float | None = None
    log_x: bool = False
    top: float | None = None


class Axis(NamedTuple):
    """A scale from values to pixels, and the values that get a tick."""

    low: float
    high: float
    start: float
    end: float
    log: bool
    ticks: Sequence[float]

    def at(self, value: float) -> float:
        """The pixel of a value."""
        low, high, here = self.low, self.high, value
        if self.log:
            low, high, here = math.log10(low), math.log10(high), math.log10(value)
        return self.start + (here - low) / (high - low) * (self.end - self.start)


def draw(panels: Sequence[Panel], title: str) -> str:
    """The panels in two columns under one title and one legend: a self-contained SVG."""
    rows = -(-len(panels) // 2)
    width, height, head = 2 * WIDTH, rows * HEIGHT, 64
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="chart" width="{width}" '
        f'height="{height + head}" viewBox="0 0 {width} {height + head}" role="img">',
        f"<title>{escape(title)}</title><style>{STYLE}</style>",
        f'<rect class="ground" width="{width}" height="{height + head}"/>',
        _text(LEFT, 26, title, "title"),
    ]
    x = float(LEFT)
    for index, line in enumerate(panels[0].lines):
        parts.append(f'<rect x="{x:.0f}" y="42" width="14" height="4" fill="{_colour(index)}"/>')
        parts.append(_text(x + 20, 49, line.name))
        x += 44 + 7 * len(line.name)
    for index, panel in enumerate(panels):
        place = f"{index % 2 * WIDTH} {head + index // 2 * HEIGHT}"
        parts.append(f'<g transform="translate({place})">{"".join(_panel(panel))}</g>')
    return "\n".join([*parts, "</svg>\n"])


def _panel(panel: Panel) -> Iterable[str]:
    xs = [x for line in panel.lines for x, _ in line.points]
    ys = [y for line in panel.lines for _, y in line.points]
    if panel.limit is not None:
        xs.append(panel.limit)
    x = _axis(xs, LEFT, WIDTH - RIGHT, panel.log_x)
    y = _axis([0.0, *(ys if panel.top is None else [panel.top])], HEIGHT - BOTTOM, TOP, False)
    yield _text(LEFT, 24, panel.title, "title")
    for tick in x.ticks:
        yield _rule(x.at(tick), TOP, x.at(tick), HEIGHT - BOTTOM, "grid")
        yield _text(x.at(tick), HEIGHT - BOTTOM + 16, f"{tick:,.10g}", anchor="middle")
    for tick in y.ticks:
        yield _rule(LEFT, y.at(tick), WIDTH - RIGHT, y.at(tick), "grid")
        yield _text(LEFT - 6, y.at(tick) + 4, f"{tick:,.10g}", anchor="end")
    yield _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, panel.x_label, anchor="middle")
    yield _text(WIDTH - RIGHT, 24, panel.y_label, anchor="end")
    if panel.limit is not None:
        yield _rule(x.at(panel.limit), TOP, x.at(panel.limit), HEIGHT - BOTTOM, "limit")
        yield _text(x.at(panel.limit) + 4, TOP + 12, "SLO")
    for index, line in enumerate(panel.lines):
        points = " ".join(f"{x.at(a):.1f},{y.at(b):.1f}" for a, b in line.points)
        if points:
            yield (
                f'<polyline class="line" stroke="{_colour(index)}" points="{points}">'
                f"<title>{escape(line.name)}</title></polyline>"
            )


def _axis(values: Sequence[float], start: float, end: float, log: bool) -> Axis:
    low, high = min(values, default=1.0), max(values, default=1.0)
    if log:
        first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
        last = max(last, first + 1)
        every = [10.0**n * d for n in range(first, last) for d in (1, 2, 5)] + [10.0**last]
        below, above = [t for t in every if t <= low], [t for t in every if t >= high]
        ticks = [t for t in every if below[-1] <= t <= max(above[0], below[-1] * 2)]
        return Axis(ticks[0], ticks[-1], start, end, True, ticks)
    span = high - low if high > low else 1.0
    step = 10.0 ** math.floor(math.log10(span / 4))
    step *= next((m for m in (1, 2, 2.5, 5) if span / (m * step) <= 5), 10)
    first, last = math.floor(low / step + 1e-9), max(1, math.ceil((low + span) / step - 1e-9))
    ticks = [n * step for n in range(first, last + 1)]
    return Axis(ticks[0], ticks[-1], start, end, False, ticks)


def _colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]


def _text(x: float, y: float, text: str, kind: str = "label", anchor: str = "start") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{escape(text)}</text>'
    )


def _rule(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'
