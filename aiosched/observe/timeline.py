"""Timeline: the latest steps of an engine, to be looked at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from aiosched.observe.records import StepRecord
from aiosched.observe.stats import StepTimes

FORMATS = (".html", ".json")
"""What a timeline can be saved as, by the ending of the file's name."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """Steps as they went, oldest first: device and host on one clock.

    A snapshot that nobody changes any more. Drawing thousands of steps takes some tenths of a
    second, so a program that serves meanwhile does it in a thread::

        timeline = engine.timeline()
        await asyncio.to_thread(timeline.save, "timeline.html")

    Attributes:
        records: the steps whose results were processed.
        title: what ran, for the heading.
        origin: the moment, on the device's clock, that is 0 on the time axis; ``None``: when the
            first step started on the device.
    """

    records: Sequence[StepRecord]
    title: str = "steps"
    origin: float | None = None

    def __len__(self) -> int:
        return len(self.records)

    def average(self) -> StepTimes:
        """Device time, host time, idle gap and overlap ratio, averaged over all steps."""
        records = self.records
        return StepTimes.of(
            len(records),
            sum(record.device_seconds for record in records),
            sum(record.host_seconds for record in records),
            sum(record.hidden_seconds for record in records),
            sum(record.idle_gap_seconds for record in records),
        )

    @property
    def starts_at(self) -> float:
        """``origin``, or what stands in for it."""
        if self.origin is not None:
            return self.origin
        return next((r.device_started for r in self.records if r.device_finished), 0.0)

    @property
    def idle_share(self) -> float:
        """Share of the time in which the device stood idle while requests were running."""
        average = self.average()
        return average.idle_gap_ms / average.step_ms if average.step_ms else 0.0

    def to_perfetto(self) -> str:
        """A trace in Chrome's JSON format, for https://ui.perfetto.dev or chrome://tracing."""
        from aiosched.observe.perfetto import trace

        return trace([self])

    def to_html(self) -> str:
        """A page of its own that draws both lanes; it needs no network."""
        from aiosched.observe.page import page

        return page([self])

    def save(self, path: str | Path) -> None:
        """Write ``to_html`` to a file ``….html``, or ``to_perfetto`` to ``….json``.

        Raises:
            ValueError: the name has another ending.
            OSError: the file cannot be written.
        """
        save([self], path)


def save(timelines: Sequence[Timeline], path: str | Path, heading: str = "") -> None:
    """Write several timelines to one file, one above the other, as ``Timeline.save`` does.

    ``heading``: what all of them are of.
    """
    path = Path(path)
    if path.suffix not in FORMATS:
        raise ValueError(f"{path}: a timeline is saved as {' or '.join(FORMATS)}")
    from aiosched.observe.page import page
    from aiosched.observe.perfetto import trace

    draw = page if path.suffix == ".html" else trace
    path.write_text(draw(timelines, heading), encoding="utf-8")
