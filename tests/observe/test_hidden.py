"""HiddenTime: host work laid over device work."""

from __future__ import annotations

import random

import pytest

from aiosched.observe.hidden import HiddenTime


def found(overlap: HiddenTime) -> tuple[float, float]:
    return overlap.settled, overlap.hidden


def test_host_work_within_a_forward_is_hidden() -> None:
    overlap = HiddenTime()
    overlap.host_worked(11.0, 13.0)
    assert found(overlap) == (0.0, 0.0)  # pending until the forward is back
    overlap.device_worked(10.0, 14.0)
    assert found(overlap) == (2.0, 2.0)


def test_host_work_between_two_forwards_is_not() -> None:
    overlap = HiddenTime()
    overlap.device_worked(10.0, 14.0)
    overlap.host_worked(14.0, 16.0)
    overlap.device_worked(16.0, 20.0)
    assert found(overlap) == (2.0, 0.0)


def test_host_work_that_outlasts_a_forward_is_settled_piece_by_piece() -> None:
    overlap = HiddenTime()
    overlap.host_worked(11.0, 21.0)
    overlap.device_worked(10.0, 14.0)
    assert found(overlap) == (3.0, 3.0)
    overlap.device_worked(16.0, 18.0)
    assert found(overlap) == (7.0, 5.0)
    overlap.device_worked(20.0, 30.0)
    assert found(overlap) == (10.0, 6.0)


def test_host_work_before_a_rest_of_the_device_was_done_beside_an_idle_one() -> None:
    overlap = HiddenTime()
    overlap.host_worked(14.0, 15.0)
    overlap.device_rests()
    assert found(overlap) == (1.0, 0.0)
    overlap.device_worked(20.0, 24.0)
    assert found(overlap) == (1.0, 0.0)


def test_host_work_beside_a_device_that_tells_nothing_counts_for_nothing() -> None:
    overlap = HiddenTime()
    overlap.host_worked(14.0, 15.0)
    overlap.forget()
    overlap.device_rests()
    assert found(overlap) == (0.0, 0.0)


def intervals(draw: random.Random, count: int) -> list[tuple[float, float]]:
    moments = sorted(draw.randrange(4 * count) for _ in range(2 * count))
    return [(float(moments[2 * i]), float(moments[2 * i + 1])) for i in range(count)]


@pytest.mark.parametrize("seed", range(20))
def test_the_sums_are_those_of_comparing_every_host_interval_with_every_forward(seed: int) -> None:
    draw = random.Random(seed)
    host, device = intervals(draw, 40), intervals(draw, 30)
    overlap = HiddenTime()
    told = iter([*host, None])
    following = next(told)
    for forward in device:  # of host work all is told that began before a forward came back
        while following is not None and following[0] < forward[1]:
            overlap.host_worked(*following)
            following = next(told)
        overlap.device_worked(*forward)
    overlap.device_rests()
    began = [interval for interval in host if interval[0] < device[-1][1]]
    hidden = sum(max(0.0, min(b, d) - max(a, c)) for a, b in began for c, d in device)
    assert overlap.hidden == hidden
    assert overlap.settled == sum(b - a for a, b in began)
