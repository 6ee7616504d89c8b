"""What steps write to the log, and that they write nothing unasked."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
from observe.recorded import step

from aiosched.observe.stats import StepTimes
from aiosched.observe.step_log import SUMMARY_SECONDS, StepLog

TIMES = StepTimes(steps=128, device_ms=4.0, host_ms=2.0, idle_gap_ms=0.5, overlap_ratio=0.75)


@pytest.fixture
def logged() -> Iterator[tuple[logging.Logger, list[dict[str, Any]]]]:
    """The logger of steps, and what it is told."""
    events: list[dict[str, Any]] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            usual = vars(logging.makeLogRecord({}))
            fields = {k: v for k, v in vars(record).items() if k not in usual}
            events.append({"event": record.getMessage(), "level": record.levelname} | fields)

    logger, handler = logging.getLogger("aiosched.steps"), Collect()
    logger.addHandler(handler)
    yield logger, events
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)


def test_at_debug_level_each_step_is_an_event_with_its_times_and_why_it_did_not_overlap(
    logged: Any,
) -> None:
    logger, events = logged
    logger.setLevel(logging.DEBUG)
    assert StepLog().wants_steps
    StepLog().step(step(7, 100.0))
    assert events == [
        {
            "event": "step",
            "level": "DEBUG",
            "step": 7,
            "mode": "decode",
            "sequences": 2,
            "tokens": 2,
            "depth": 0,
            "device_ms": 4000.0,
            "host_ms": 2000.0,
            "idle_gap_ms": 2000.0,
            "overlap_ratio": 0.25,
            "reason": "depth 0",
        }
    ]


def test_at_info_level_there_are_summaries_of_what_is_new(logged: Any) -> None:
    logger, events = logged
    logger.setLevel(logging.INFO)
    log = StepLog()
    log.step(step(1, 100.0))
    assert log.due == SUMMARY_SECONDS
    log.summary(1000, 2000, 10.0, TIMES, {"a": 3})
    assert log.due == 10.0 + SUMMARY_SECONDS
    log.summary(3000, 6000, 20.0, TIMES, {"a": 3, "b": 1})
    assert [event["event"] for event in events] == ["steps", "steps"]
    first, second = events
    assert (first["steps"], first["tokens"], first["tokens_per_second"]) == (1000, 2000, 200.0)
    assert (second["steps"], second["tokens"], second["tokens_per_second"]) == (2000, 4000, 400.0)
    assert (first["not_overlapped"], second["not_overlapped"]) == ({"a": 3}, {"b": 1})
    keys = ("device_ms", "host_ms", "idle_gap_ms", "overlap_ratio")
    assert [first[key] for key in keys] == [4.0, 2.0, 0.5, 0.75]


def test_with_logging_off_nothing_is_written_and_summaries_move_on(logged: Any) -> None:
    logger, events = logged
    logger.setLevel(logging.WARNING)
    log = StepLog()
    assert not log.wants_steps
    log.step(step(1, 100.0))
    log.summary(1000, 2000, 10.0, TIMES, {})
    assert events == []
    assert log.due == 10.0 + SUMMARY_SECONDS
