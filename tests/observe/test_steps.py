"""StepMeter: sums, recent averages and records, of moments that the test sets."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, cast

import pytest

from aiosched.device.stream import InFlight
from aiosched.observe.records import KEPT_STEPS, NOTHING_IN_FLIGHT, StepRecorder
from aiosched.observe.steps import RECENT_STEPS, StepMeter


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def forward(step: int, started: float, finished: float) -> InFlight[Any]:
    flight: InFlight[Any] = InFlight(step, "forward", cast(asyncio.AbstractEventLoop, None))
    flight.started, flight.finished = started, finished
    return flight


class Played:
    """A meter that is told of steps under the normal loop: 1 s plan, 4 s device, 2 s commit."""

    def __init__(self, *, timeline: bool = False) -> None:
        self.clock = Clock()
        self.meter = StepMeter(self.clock, timeline=timeline)
        self.clock.now = 100.0

    def step(self, number: int, tokens: int = 3) -> None:
        meter, clock = self.meter, self.clock
        meter.plan_begins()
        clock.now += 0.75
        if meter.recording:
            meter.planned(number, "decode", tokens)
            meter.launching(number, 0, "depth 0")
        clock.now += 0.25
        started = clock.now
        if meter.recording:
            meter.launched(number)
        meter.host_ends()
        clock.now += 0.5
        if meter.recording:
            meter.readers_ran(number)
        clock.now = started + 4.0
        meter.host_begins()
        clock.now += 2.0
        meter.step_done(tokens, forward(number, started, started + 4.0))


def test_averages_are_those_of_the_loop() -> None:
    played = Played()
    for number in range(1, 11):
        played.step(number)
    recent = played.meter.recent()
    assert recent.steps == 10
    assert recent.device_ms == pytest.approx(4000.0)
    assert recent.idle_gap_ms == pytest.approx(2700.0)  # nine gaps of 3 s
    assert recent.step_ms == pytest.approx(6700.0)
    assert recent.host_ms == pytest.approx(2800.0)  # the last commit is not settled yet
    assert recent.overlap_ratio == played.meter.overlap_ratio == 0.0
    assert (played.meter.steps, played.meter.tokens) == (10, 30)


def test_recent_averages_forget_what_was_long_ago() -> None:
    played = Played()
    played.step(1)
    played.meter.host_ends()
    played.clock.now += 1000.0  # one long gap
    for number in range(2, 2 * RECENT_STEPS):
        played.step(number)
    recent = played.meter.recent()
    assert recent.steps == RECENT_STEPS
    assert (recent.device_ms, recent.idle_gap_ms) == (4000.0, 3000.0)
    assert played.meter.idle_gap > 1000.0


def test_before_the_first_step_all_averages_are_zero() -> None:
    recent = StepMeter().recent()
    assert (recent.steps, recent.device_ms, recent.host_ms, recent.overlap_ratio) == (0, 0, 0, 0)
    assert StepMeter().overlap_ratio == 0.0


def test_host_work_behind_a_forward_counts_as_hidden() -> None:
    clock = Clock()
    meter = StepMeter(clock)
    for began, ended in ((10.0, 11.0), (12.0, 14.0)):  # the forward runs from 11 to 15
        clock.now = began
        meter.host_begins()
        clock.now = ended
        meter.host_ends()
    meter.step_done(1, forward(1, 11.0, 15.0))
    assert meter.overlap_ratio == pytest.approx(2 / 3)
    assert meter.recent().overlap_ratio == pytest.approx(2 / 3)


def test_a_device_without_times_leaves_no_host_work_pending() -> None:
    played = Played()
    for number in range(1, 100):
        played.meter.host_begins()
        played.clock.now += 1.0
        played.meter.host_ends()
        played.meter.step_done(1, forward(number, 0.0, 0.0))
    assert not played.meter._overlap._pending
    assert played.meter.host == 99.0


def test_nothing_is_recorded_unless_asked_for() -> None:
    played = Played()
    played.step(1)
    assert not played.meter.recording
    assert len(played.meter.records) == 0


def test_a_record_has_every_moment_of_its_step() -> None:
    played = Played(timeline=True)
    played.step(1)
    played.step(2)
    first, second = played.meter.records
    assert (first.step, first.mode, first.sequences, first.tokens) == (1, "decode", 3, 3)
    assert (first.depth, first.reason) == (0, "depth 0")
    assert (first.planning, first.planned) == (100.0, 100.75)
    assert (first.launching, first.launched) == (100.75, 101.0)
    assert (first.readers_began, first.readers_ended) == (101.0, 101.5)
    assert (first.device_started, first.device_finished) == (101.0, 105.0)
    assert (first.landed, first.committed) == (105.0, 107.0)
    assert first.idle_gap_seconds == 0.0
    assert second.idle_gap_seconds == 3.0
    assert (second.device_seconds, second.host_seconds, second.overlap_ratio) == (4.0, 3.0, 0.0)


def test_a_reason_that_was_told_before_the_launch_goes_before_the_other() -> None:
    meter = StepMeter(Clock(), timeline=True)
    for number, reason in ((1, "consecutive prefill"), (2, None)):
        meter.plan_begins()
        meter.planned(number, "extend", 1)
        if reason is not None:
            meter.did_not_overlap(reason)
        meter.launching(number, 0, None)
        meter.step_done(1, forward(number, 1.0, 2.0))
    assert [record.reason for record in meter.records] == [
        "consecutive prefill",
        NOTHING_IN_FLIGHT,
    ]
    assert meter.not_overlapped == {"consecutive prefill": 1}


def test_a_step_that_overlapped_has_no_reason() -> None:
    meter = StepMeter(Clock(), timeline=True)
    meter.plan_begins()
    meter.planned(1, "decode", 1)
    meter.launching(1, 2, None)
    meter.step_done(1, forward(1, 1.0, 2.0))
    assert [(record.depth, record.reason) for record in meter.records] == [(2, None)]


def test_only_the_latest_records_are_kept() -> None:
    recorder = StepRecorder(keep=3)
    for number in range(1, 6):
        recorder.planned(number, "decode", 1, 0.0, 0.0)
        recorder.committed(number, 1, (0.0, 1.0), (1.0, 1.0), 0.0, 0.0, 0.0)
    assert [record.step for record in recorder.records] == [3, 4, 5]
    assert StepMeter(timeline=True).records.maxlen == KEPT_STEPS  # type: ignore[attr-defined]


def test_a_step_that_was_in_flight_when_recording_began_is_left_out() -> None:
    played = Played()
    played.meter.plan_begins()
    logging.getLogger("aiosched.steps").setLevel(logging.DEBUG)
    try:
        played.meter.plan_begins()
        assert played.meter.recording
        played.meter.launching(1, 0, None)
        played.meter.launched(1)
        played.meter.readers_ran(1)
        played.meter.step_done(1, forward(1, 1.0, 2.0))
    finally:
        logging.getLogger("aiosched.steps").setLevel(logging.NOTSET)
    assert (played.meter.steps, len(played.meter.records)) == (1, 0)
