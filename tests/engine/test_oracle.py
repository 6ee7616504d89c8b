"""Whatever the schedule, every stream is what the model would have said to it alone."""

from __future__ import annotations

import os
import threading

from crowd import check, serve, serve_alone
from hypothesis import HealthCheck, given, settings
from traffic import Scenario, scenarios

from aiosched.testing.clock import VirtualClock


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0


def serve_and_check(scenario: Scenario) -> None:
    alone = VirtualClock().run(serve_alone(scenario))
    before = threading.active_count(), open_descriptors()
    for one, reference in zip(VirtualClock().run(serve(scenario)), alone, strict=True):
        check(scenario, one, reference)
    assert (threading.active_count(), open_descriptors()) == before


@given(scenarios())
@settings(
    max_examples=40,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
def test_random_traffic_gives_every_reader_its_own_answer_and_leaves_nothing(
    scenario: Scenario,
) -> None:
    serve_and_check(scenario)
