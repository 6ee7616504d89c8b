from __future__ import annotations

import asyncio
import itertools
import threading
import time

import pytest

from aiosched.device.happens_before import RaceError
from aiosched.device.sim import SimDevice
from aiosched.device.stream import DeviceClosed
from aiosched.testing.clock import Deadlock

PATIENCE = 10.0


def opened(**settings) -> SimDevice:
    device = SimDevice(**settings)
    device.open(asyncio.get_running_loop())
    return device


def launch_step(device, step, fn=lambda: None):
    """A forward and the copy of its result."""
    forward = device.forward.launch(fn, step=step, label="forward")
    copy = device.copy.launch(lambda: forward.value, step=step, label="copy", after=[forward])
    return forward, copy


async def wait(flight):
    return await flight


def test_work_takes_its_cost_and_a_stream_runs_one_piece_at_a_time(vrun):
    async def main():
        device = opened(forward_time=0.010, copy_time=0.002, stage_time=0.001)
        flights = [
            device.forward.launch(lambda: None, step=0, label="forward"),
            device.forward.launch(lambda: None, step=1, label="forward"),
            device.copy.launch(lambda: None, step=0, label="copy"),
            device.schedule.launch(lambda: None, step=0, label="stage"),
        ]
        for flight in flights:
            await flight
        spans = [(flight.started, flight.finished) for flight in flights]
        expected = [(0.0, 0.010), (0.010, 0.020), (0.0, 0.002), (0.0, 0.001)]
        assert spans == [pytest.approx(span) for span in expected]
        assert device.now() == pytest.approx(0.020)
        device.close(0)

    vrun(main())


def test_work_starts_when_all_that_it_is_ordered_behind_is_done(vrun):
    async def main():
        device = opened(forward_time=0.010, copy_time=0.002, stage_time=0.003)
        stage = device.schedule.launch(lambda: None, step=0, label="stage")
        forward = device.forward.launch(lambda: None, step=0, label="forward", after=[stage])
        copy = device.copy.launch(lambda: None, step=0, label="copy", after=[stage, forward])
        await copy
        assert (forward.started, copy.started) == pytest.approx((0.003, 0.013))
        assert copy.finished == pytest.approx(0.015)
        device.close(0)

    vrun(main())


def test_a_cost_may_depend_on_step_and_label(vrun):
    async def main():
        device = opened(forward_time=lambda step, label: step if label == "forward" else 0.5)
        flights = [
            device.forward.launch(lambda: None, step=step, label=label)
            for step, label in [(2, "forward"), (3, "forward"), (2, "sample")]
        ]
        await flights[-1]
        assert [flight.device_seconds for flight in flights] == [2, 3, 0.5]
        device.close(0)

    vrun(main())


def test_a_step_costs_the_longer_of_device_and_host_when_they_overlap(vrun, clock):
    async def serial(device, steps):
        for step in range(steps):
            _, copy = launch_step(device, step)
            await copy
            await asyncio.sleep(0.006)

    async def overlapped(device, steps):
        previous = None
        for step in range(steps):
            _, copy = launch_step(device, step)
            if previous is not None:
                await previous
                await asyncio.sleep(0.006)
            previous = copy
        await previous
        await asyncio.sleep(0.006)

    async def main(schedule):
        device = opened(forward_time=0.010)
        began = clock.time()
        await schedule(device, 100)
        device.close(0)
        return clock.time() - began

    assert vrun(main(serial)) == pytest.approx(1.6)
    assert vrun(main(overlapped)) == pytest.approx(1.006)


def test_work_runs_at_its_simulated_end_not_at_its_launch(vrun, clock):
    async def main():
        device = opened(copy_time=0.004)
        landed = []
        flight = device.copy.launch(lambda: landed.append(clock.time()), step=0, label="copy")
        await asyncio.sleep(0.003)
        assert landed == []
        assert not flight.done()
        await flight
        assert landed == [pytest.approx(0.004)]
        device.close(0)

    vrun(main())


def test_work_without_cost_is_done_some_turns_of_the_loop_later(run):
    async def main():
        device = opened()
        forward, copy = launch_step(device, 0, lambda: 7)
        assert not forward.done()
        await asyncio.sleep(0)
        assert forward.done()
        assert not copy.done()
        await asyncio.sleep(0)
        assert copy.value == 7
        device.close(0)

    run(main())


def test_held_work_waits_at_its_end_until_it_is_released(vrun, clock):
    async def main():
        device = opened(forward_time=0.010)
        device.hold(1, "forward")
        ran = []
        flights = [
            device.forward.launch(lambda s=step: ran.append(s), step=step, label="forward")
            for step in range(3)
        ]
        await device.reached(1)
        assert clock.time() == pytest.approx(0.020)
        await asyncio.sleep(1)
        assert ran == [0]
        assert [flight.done() for flight in flights] == [True, False, False]
        device.release(1, "forward")
        assert ran == [0, 1]
        await flights[2]
        # The stream stood still meanwhile.
        assert flights[1].finished == pytest.approx(1.020)
        assert flights[2].finished == pytest.approx(1.030)
        device.close(0)

    vrun(main())


def test_a_gated_device_holds_everything_and_opens_step_by_step(vrun):
    async def main():
        device = opened(gated=True)
        flights = [launch_step(device, step) for step in range(3)]
        device.release(0)
        await flights[0][1]
        await device.reached(1, "forward")
        device.release(1, "forward")
        await device.reached(1, "copy")
        assert flights[1][0].done()
        assert not flights[1][1].done()
        device.release()
        await flights[2][1]
        device.close(0)

    vrun(main())


def test_the_last_word_about_a_gate_decides(vrun):
    async def main():
        device = opened()
        device.hold()
        device.release(step=0)
        device.hold(label="copy")
        forward, copy = launch_step(device, 0)
        await forward
        await device.reached(0, "copy")
        assert not copy.done()
        device.release(label="copy")
        assert copy.done()
        held, _ = launch_step(device, 1)
        await device.reached(1)
        assert not held.done()
        device.close(0)

    vrun(main())


def test_gates_may_be_set_before_the_device_is_open(vrun):
    async def main():
        device = SimDevice()
        device.hold(0)
        device.open(asyncio.get_running_loop())
        forward = device.forward.launch(lambda: None, step=0, label="forward")
        await device.reached(0)
        assert not forward.done()
        device.close(0)

    vrun(main())


def test_reached_returns_at_once_for_work_that_has_passed(vrun):
    async def main():
        device = opened()
        await device.forward.launch(lambda: None, step=0, label="forward")
        await device.reached(0)
        device.close(0)

    vrun(main())


def test_a_shut_gate_is_a_deadlock_in_virtual_time_not_a_hang(clock):
    async def main():
        device = opened(gated=True)
        await device.forward.launch(lambda: None, step=0, label="forward")

    with pytest.raises(Deadlock, match="test_sim"):
        clock.run(main())


def test_work_that_is_told_to_fail_fails_and_takes_its_dependents_along(vrun):
    async def main():
        device = opened()
        device.failing(1, "forward", ValueError("out of memory"))
        ran = []
        bad = device.forward.launch(lambda: ran.append(1), step=1, label="forward")
        dependent = device.copy.launch(lambda: ran.append(2), step=1, label="copy", after=[bad])
        good = device.forward.launch(lambda: 3, step=2, label="forward")
        with pytest.raises(ValueError, match="out of memory"):
            await bad
        with pytest.raises(ValueError, match="out of memory"):
            await dependent
        assert await good == 3
        assert ran == []
        device.close(0)

    vrun(main())


def test_the_trace_tells_launch_start_and_finish(vrun):
    async def main():
        device = opened(forward_time=0.010)
        _, copy = launch_step(device, 4)
        await copy
        assert [(r.kind, r.time, r.stream, r.label) for r in device.trace if r.step == 4] == [
            ("launch", 0.0, "forward", "forward"),
            ("start", 0.0, "forward", "forward"),
            ("launch", 0.0, "copy", "copy"),
            ("finish", pytest.approx(0.010), "forward", "forward"),
            ("start", pytest.approx(0.010), "copy", "copy"),
            ("finish", pytest.approx(0.010), "copy", "copy"),
        ]
        device.close(0)

    vrun(main())


def test_close_fails_what_is_unfinished_and_leaves_no_timer(vrun):
    async def main():
        device = opened(forward_time=100.0)
        ran = []
        flights = launch_step(device, 0, lambda: ran.append(1))
        waiting = [asyncio.create_task(wait(flight)) for flight in flights]
        await asyncio.sleep(1)
        device.close(0)
        for task in waiting:
            with pytest.raises(DeviceClosed, match="step 0"):
                await task
        with pytest.raises(DeviceClosed):
            launch_step(device, 1)
        device.close(0)
        await asyncio.sleep(1000)
        assert ran == []

    vrun(main())


# Happens-before: the device raises where the breach is, whatever the timing.


def test_a_page_table_that_a_step_in_flight_reads_may_not_be_written(vrun):
    async def main(observed):
        device = opened(gated=True)
        table = "page table of A"
        forward = device.forward.launch(lambda: None, step=1, label="forward", reads=[table])
        if observed:
            device.release(1)
            await forward
        device.host_access(writes=[table])
        device.close(0)
        return len(device.races)

    assert vrun(main(observed=True)) == 0
    with pytest.raises(
        RaceError, match="the write by the host behind the read by step 1 'forward'"
    ):
        vrun(main(observed=False))


def test_a_schedule_stream_write_must_be_ordered_behind_the_step_that_reads(vrun):
    async def main(ordered):
        device = opened()
        table = "page table"
        forward = device.forward.launch(lambda: None, step=1, label="forward", reads=[table])
        after = [forward] if ordered else []
        stage = device.schedule.launch(
            lambda: None, step=2, label="stage", after=after, writes=[table]
        )
        await stage
        device.close(0)

    vrun(main(ordered=True))
    with pytest.raises(RaceError, match="step 2 'stage' on stream 'schedule' behind the read by"):
        vrun(main(ordered=False))


def test_the_host_may_read_only_what_has_landed(vrun):
    async def main(which):
        device = opened()
        target = "pinned buffer"
        forward = device.forward.launch(lambda: None, step=0, label="forward")
        copy = device.copy.launch(
            lambda: None, step=0, label="copy", after=[forward], writes=[target]
        )
        await {"copy": copy, "forward": forward}[which]
        device.host_access(reads=[target])
        device.close(0)

    vrun(main("copy"))
    with pytest.raises(RaceError):
        vrun(main("forward"))


def test_seeing_that_work_is_done_orders_the_host_behind_it(vrun):
    async def main(look):
        device = opened()
        copy = device.copy.launch(lambda: None, step=0, label="copy", writes=["buffer"])
        await asyncio.sleep(1)
        look(copy)
        device.host_access(reads=["buffer"])
        device.close(0)

    vrun(main(lambda copy: copy.done()))
    vrun(main(lambda copy: copy.value))
    with pytest.raises(RaceError):
        vrun(main(lambda copy: None))


def test_a_result_read_by_work_that_is_not_ordered_behind_it_is_a_race(vrun):
    async def main():
        device = opened(copy_time=1.0)
        forward = device.forward.launch(lambda: 1, step=0, label="forward")
        copy = device.copy.launch(lambda: forward.value, step=0, label="copy")  # no after=
        with pytest.raises(RaceError, match="result"):
            await copy
        assert len(device.races) == 1
        device.close(0)

    vrun(main())


def test_a_result_read_by_work_is_not_seen_by_the_host(vrun):
    async def main():
        device = opened()
        forward = device.forward.launch(lambda: 1, step=0, label="forward", writes=["buffer"])
        device.copy.launch(lambda: forward.value, step=0, label="copy", after=[forward])
        await asyncio.sleep(1)
        with pytest.raises(RaceError):
            device.host_access(reads=["buffer"])
        device.close(0)

    vrun(main())


def test_races_are_kept_for_the_end_of_a_test_and_checking_can_be_switched_off(vrun):
    async def main(check):
        device = opened(check=check)
        device.forward.launch(lambda: None, step=0, label="forward", writes=["x"])
        if check:
            with pytest.raises(RaceError):
                device.host_access(reads=["x"])
        else:
            device.host_access(reads=["x"])
        device.close(0)
        return len(device.races)

    assert vrun(main(check=True)) == 1
    assert vrun(main(check=False)) == 0


# Real time: a thread of its own.


def test_in_real_time_the_timeline_is_exact_and_results_come_soon_after(run):
    async def main():
        device = opened(forward_time=0.003, realtime=True)
        threads = set()
        began = time.perf_counter()
        flights = [
            launch_step(device, step, lambda: threads.add(threading.get_ident()))
            for step in range(20)
        ]
        await flights[-1][1]
        assert time.perf_counter() - began >= 20 * 0.003
        assert [forward.device_seconds for forward, _ in flights] == pytest.approx([0.003] * 20)
        # Nominal time: every step starts at the exact end of the one before.
        for (earlier, _), (later, _) in itertools.pairwise(flights):
            assert later.started == earlier.finished
        assert threads and threading.get_ident() not in threads
        assert {"aiosched-sim"} <= {thread.name for thread in threading.enumerate()}
        device.close(PATIENCE)
        assert "aiosched-sim" not in {thread.name for thread in threading.enumerate()}

    run(main())


def test_in_real_time_gates_and_failures_work_as_in_virtual_time(run):
    async def main():
        device = opened(realtime=True)
        device.hold(1, "forward")
        device.failing(2)
        first, second, third = [launch_step(device, step, lambda: "value") for step in (0, 1, 2)]
        assert await first[1] == "value"
        await device.reached(1)
        assert not second[0].done()
        device.release()
        assert await second[1] == "value"
        with pytest.raises(RuntimeError, match="step 2 'forward' was told to fail"):
            await third[1]
        await device.reached(1)
        device.close(PATIENCE)

    run(main())


def test_in_real_time_close_fails_what_is_unfinished(run):
    async def main():
        device = opened(forward_time=1000.0, realtime=True)
        waiting = [asyncio.create_task(wait(flight)) for flight in launch_step(device, 0)]
        await asyncio.sleep(0)
        device.close(PATIENCE)
        for task in waiting:
            with pytest.raises(DeviceClosed):
                await task

    run(main())
