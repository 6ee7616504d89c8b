"""Timelines as one page of HTML that needs nothing else: no network, no other file.

Python puts the numbers into the template ``timeline.html``; the script there draws them, for the
part of the time axis that is in view.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import msgspec

from aiosched.observe.records import StepRecord

if TYPE_CHECKING:
    from aiosched.observe.timeline import Timeline

SHOWN_STEPS = 8
"""Steps in view when the page opens; one zooms out to the rest."""


def page(timelines: Sequence[Timeline], heading: str = "", shown: int = SHOWN_STEPS) -> str:
    """HTML that draws the timelines one above the other, from the start of each, on one time axis.

    With several, the first is what the others are compared with.

    Args:
        heading: what ran, in a line.
        shown: steps in view at first.
    """
    template = files("aiosched.observe").joinpath("timeline.html").read_text(encoding="utf-8")
    data = {"shown": shown, "timelines": [_drawn(timeline) for timeline in timelines]}
    # In a script only "</" could end the text early; in JSON the slash may be escaped.
    encoded = msgspec.json.encode(data).decode().replace("</", "<\\/")
    heading = heading or f"{sum(map(len, timelines)):,} steps of an engine"
    for name, text in (
        ("heading", escape(heading)),
        ("summary", escape(summary(timelines))),
        ("data", encoded),
    ):
        template = template.replace(f"{{{{{name}}}}}", text)
    return template


def summary(timelines: Sequence[Timeline]) -> str:
    """What the timelines show, in a sentence or two, and no more."""
    drawn = [timeline for timeline in timelines if len(timeline)]
    if not drawn:
        return "No step was recorded."
    if len(drawn) == 1:
        average = drawn[0].average()
        return (
            f"{average.step_ms:.2f} ms a step. The device stood idle "
            f"{drawn[0].idle_share:.1%} of the time; {average.overlap_ratio:.0%} of the host's "
            f"{average.host_ms:.2f} ms a step was hidden behind its work."
        )
    first, last = drawn[0], drawn[-1]
    before, after = first.average().step_ms, last.average().step_ms
    change = after / before - 1
    return (
        f"From {before:.2f} to {after:.2f} ms a step, {abs(change):.0%} "
        f"{'less' if change < 0 else 'more'}: the device stood idle {first.idle_share:.1%} of the "
        f"time in the {first.title}, {last.idle_share:.1%} in the {last.title}."
    )


def _drawn(timeline: Timeline) -> dict[str, Any]:
    """What the script draws: a row for each step, its moments in ms from the first one's start."""
    steps = [record for record in timeline.records if record.device_finished]
    average = timeline.average()
    start = timeline.starts_at
    return {
        "title": timeline.title,
        "step_ms": round(average.step_ms, 3),
        "host_ms": round(average.host_ms, 3),
        "overlap_ratio": round(average.overlap_ratio, 4),
        "idle_share": round(timeline.idle_share, 4),
        "steps": [_row(record, start) for record in steps],
    }


def _row(record: StepRecord, start: float) -> list[Any]:
    """In the order that the script's ``FIELDS`` names."""

    def ms(moment: float) -> float | None:
        return round(1e3 * (moment - start), 3) if moment else None

    return [
        record.step,
        record.mode,
        record.sequences,
        record.tokens,
        record.depth,
        record.reason,
        ms(record.planning),
        ms(record.planned),
        ms(record.launching),
        ms(record.launched),
        ms(record.readers_began),
        ms(record.readers_ended),
        ms(record.device_started),
        ms(record.device_finished),
        ms(record.landed),
        ms(record.committed),
        round(1e3 * record.host_seconds, 3),
        round(record.overlap_ratio, 3),
        round(1e3 * record.idle_gap_seconds, 3),
    ]
