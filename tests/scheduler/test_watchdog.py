"""Invariant 9, one rank: every wait for the device has a deadline, and its error names the step."""

from __future__ import annotations

import asyncio

import pytest

from aiosched.errors import DeviceStalled
from aiosched.scheduler.watchdog import Watchdog


@pytest.fixture
def failures():
    return []


@pytest.fixture
def watched(vrun, failures):
    """Runs ``scenario(watchdog)`` in virtual time with a limit of 10 s."""

    def runner(scenario, **options):
        async def main():
            watchdog = Watchdog(asyncio.get_running_loop(), 10.0, failures.append, **options)
            await scenario(watchdog)
            watchdog.rest()

        vrun(main())

    return runner


def timers():
    return [t for t in asyncio.get_running_loop()._scheduled if not t.cancelled()]


def test_a_step_that_never_answers_is_stalled_after_the_limit_and_fatal_after_twice_that(
    watched, failures
):
    async def scenario(watchdog):
        watchdog.launched(7)
        await asyncio.sleep(9.9)
        assert not watchdog.stalled
        await asyncio.sleep(0.2)
        assert watchdog.stalled
        assert not failures
        await asyncio.sleep(10)
        assert len(failures) == 1

    watched(scenario, rank=3)
    (error,) = failures
    assert isinstance(error, DeviceStalled)
    assert (error.step, error.fence, error.rank) == (7, "copy", 3)
    assert "step 7" in str(error) and "rank 3" in str(error) and "'copy'" in str(error)


def test_the_failure_is_told_once(watched, failures):
    async def scenario(watchdog):
        watchdog.launched(1)
        watchdog.launched(2)
        await asyncio.sleep(1000)
        assert [error.step for error in failures] == [1]
        assert not timers()

    watched(scenario)


def test_the_time_of_a_step_begins_with_the_answer_of_the_step_before(watched, failures):
    async def scenario(watchdog):
        watchdog.launched(1)
        watchdog.launched(2)
        await asyncio.sleep(9.9)
        watchdog.landed()  # step 1, in time; step 2 has waited for it
        await asyncio.sleep(9.9)
        assert not watchdog.stalled
        await asyncio.sleep(0.2)
        assert watchdog.stalled

    watched(scenario)
    assert not failures


def test_a_step_that_answers_late_ends_the_stall(watched, failures):
    async def scenario(watchdog):
        watchdog.launched(1)
        await asyncio.sleep(15)
        assert watchdog.stalled
        watchdog.landed()
        assert not watchdog.stalled
        await asyncio.sleep(1000)

    watched(scenario)
    assert not failures


def test_steps_without_end_need_one_timer_that_is_not_moved(watched, failures):
    async def scenario(watchdog):
        moved = set()
        for step in range(1000):
            watchdog.launched(step)
            moved.update(timer.when() for timer in timers())
            assert len(timers()) == 1
            await asyncio.sleep(0.1)
            watchdog.landed()
        assert len(moved) <= 1000 * 0.1 / 9  # one look in each limit, not one for each step

    watched(scenario)
    assert not failures


def test_at_rest_there_is_no_timer(watched, failures):
    async def scenario(watchdog):
        assert not timers()
        watchdog.launched(1)
        watchdog.landed()
        watchdog.rest()
        assert not timers()
        await asyncio.sleep(10_000)
        watchdog.launched(2)
        await asyncio.sleep(9)
        watchdog.landed()

    watched(scenario)
    assert not failures


def test_a_loop_that_was_blocked_is_no_stalled_device(clock, watched, failures):
    """The program held the event loop for longer than both limits: the result may be there."""

    async def scenario(watchdog):
        loop = asyncio.get_running_loop()
        watchdog.launched(1)
        await asyncio.sleep(1)
        loop.call_soon(lambda: setattr(clock, "_now", clock._now + 60))  # blocks for a minute
        loop.call_later(60, watchdog.landed)  # the answer came meanwhile; its callback is next
        await asyncio.sleep(100)

    watched(scenario)
    assert not failures
