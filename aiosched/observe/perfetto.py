"""Timelines in the trace event format of Chrome, which Perfetto reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from aiosched.observe.records import StepRecord

if TYPE_CHECKING:
    from aiosched.observe.timeline import Timeline

_DEVICE, _HOST = 1, 2  # threads of a process, which is a timeline


def trace(timelines: Sequence[Timeline], heading: str = "") -> str:
    """One JSON object. Each timeline is a process with the threads ``device`` and ``host``."""
    events: list[dict[str, Any]] = []
    for process, timeline in enumerate(timelines, 1):
        events += _names(process, timeline.title)
        start = timeline.starts_at
        for record in timeline.records:
            events += _step(process, record, start)
    whole = {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"heading": heading or (timelines[0].title if timelines else "")},
    }
    return msgspec.json.encode(whole).decode()


def _names(process: int, title: str) -> Iterator[dict[str, Any]]:
    yield _event("M", process, 0, "process_name", args={"name": title})
    yield _event("M", process, 0, "process_sort_index", args={"sort_index": process})
    for thread, name in ((_DEVICE, "device"), (_HOST, "host")):
        yield _event("M", process, thread, "thread_name", args={"name": name})
        yield _event("M", process, thread, "thread_sort_index", args={"sort_index": thread})


def _step(process: int, record: StepRecord, start: float) -> Iterator[dict[str, Any]]:
    """Blocks of a step, and an arrow from its end on the device to its commit on the host."""
    step = record.step
    times = {
        "device_ms": 1e3 * record.device_seconds,
        "host_ms": 1e3 * record.host_seconds,
        "idle_gap_ms": 1e3 * record.idle_gap_seconds,
        "overlap_ratio": record.overlap_ratio,
    }
    counts = {"step": step, "sequences": record.sequences, "tokens": record.tokens}
    overlap = {"depth": record.depth, "reason": record.reason}
    forward = (_DEVICE, f"{record.mode} {step}", record.device_started, record.device_finished)
    blocks: tuple[tuple[int, str, float, float, dict[str, Any]], ...] = (
        (*forward, counts | overlap | times),
        (_HOST, f"plan {step}", record.planning, record.planned, {"step": step}),
        (_HOST, f"launch {step}", record.launching, record.launched, {"step": step} | overlap),
        (_HOST, "readers", record.readers_began, record.readers_ended, {}),
        (_HOST, f"commit {step}", record.landed, record.committed, counts),
    )
    for thread, name, began, ended, args in blocks:
        if ended:
            moment, lasted = _micros(began - start), _micros(ended - began)
            yield _event("X", process, thread, name, ts=moment, dur=lasted, args=args)
    if record.device_finished:
        flow = {"id": process << 40 | step, "cat": "step"}
        # A moment within the block: an arrow is tied to the block that lies around it.
        end = max(record.device_started, record.device_finished - 1e-6)
        yield _event("s", process, _DEVICE, "result", ts=_micros(end - start), **flow)
        landed = _micros(record.landed - start)
        yield _event("f", process, _HOST, "result", ts=landed, bp="e", **flow)


def _event(kind: str, process: int, thread: int, name: str, **more: Any) -> dict[str, Any]:
    return {"ph": kind, "pid": process, "tid": thread, "name": name, **more}


def _micros(seconds: float) -> float:
    return round(1e6 * seconds, 3)
