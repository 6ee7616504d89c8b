from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from aiosched.device.cpu import CpuDevice
from aiosched.device.stream import DeviceClosed

PATIENCE = 10.0  # seconds until a test that waits for another thread gives up


@asynccontextmanager
async def opened(threads: int | None = None) -> AsyncIterator[CpuDevice]:
    device = CpuDevice(threads)
    device.open(asyncio.get_running_loop())
    try:
        yield device
    finally:
        device.close(PATIENCE)


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Device work may wait for it; opened at the end, so that no thread outlives its test."""
    event = threading.Event()
    yield event
    event.set()


class Result:
    """Something that can be referred to weakly."""


def test_all_streams_run_in_launch_order_on_one_other_thread(run):
    async def main():
        ran = []
        async with opened() as device:
            streams = [device.forward, device.copy, device.schedule] * 5
            flights = [
                stream.launch(
                    lambda i=i: ran.append((i, threading.get_ident())), step=i, label="forward"
                )
                for i, stream in enumerate(streams)
            ]
            await flights[-1]
            assert all(flight.done() for flight in flights)
        assert [i for i, _ in ran] == list(range(15))
        (worker,) = {ident for _, ident in ran}
        assert worker != threading.get_ident()

    run(main())


def test_the_event_loop_runs_while_the_device_works(run, gate):
    async def main():
        async with opened() as device:
            flight = device.forward.launch(lambda: gate.wait(PATIENCE), step=0, label="forward")
            await asyncio.sleep(0)
            assert not flight.done()
            gate.set()
            assert await flight is True

    run(main())


def test_work_reads_the_value_of_work_that_it_is_ordered_behind(run):
    async def main():
        async with opened() as device:
            first = device.forward.launch(lambda: 20, step=0, label="forward")
            second = device.copy.launch(
                lambda: first.value + 1, step=0, label="copy", after=[first]
            )
            assert await second == 21
            assert first.value == 20

    run(main())


def test_the_value_of_unfinished_work_is_an_error_that_names_it(run, gate):
    async def main():
        async with opened() as device:
            flight = device.forward.launch(lambda: gate.wait(PATIENCE), step=3, label="forward")
            with pytest.raises(asyncio.InvalidStateError, match="step 3 'forward'"):
                _ = flight.value
            gate.set()
            await flight

    run(main())


def test_an_error_reaches_every_waiter_and_all_dependent_work(run):
    async def main():
        async with opened() as device:
            ran = []
            bad = device.forward.launch(lambda: 1 // 0, step=0, label="forward")
            dependent = device.copy.launch(
                lambda: ran.append("copy"), step=0, label="copy", after=[bad]
            )
            last = device.copy.launch(
                lambda: ran.append("last"), step=0, label="copy", after=[dependent]
            )
            other = device.forward.launch(lambda: "fine", step=1, label="forward")
            for flight in (bad, bad, dependent, last):
                with pytest.raises(ZeroDivisionError):
                    await flight
            assert ran == []
            assert await other == "fine"

    run(main())


def test_the_traceback_of_an_error_shows_the_work_and_does_not_grow(run):
    def faulty():
        raise ValueError("here")

    async def main():
        lengths = []
        async with opened() as device:
            flight = device.forward.launch(faulty, step=0, label="forward")
            for _ in range(3):
                with pytest.raises(ValueError, match="here") as caught:
                    await flight
                names = [entry.name for entry in caught.traceback]
                assert names[-1] == "faulty"
                lengths.append(len(names))
        assert len(set(lengths)) == 1

    run(main())


def test_a_cancelled_waiter_cancels_neither_the_work_nor_other_waiters(run, gate):
    async def main():
        async def wait(flight):
            return await flight

        async with opened() as device:
            flight = device.forward.launch(
                lambda: gate.wait(PATIENCE) and "result", step=0, label="forward"
            )
            tasks = [asyncio.create_task(wait(flight)) for _ in range(3)]
            await asyncio.sleep(0)
            tasks[1].cancel()
            with pytest.raises(asyncio.CancelledError):
                await tasks[1]
            gate.set()
            assert await tasks[0] == "result"
            assert await tasks[2] == "result"
            assert await flight == "result"
            assert flight._waiters == []

    run(main())


def test_a_result_that_nobody_waits_for_does_not_wake_the_loop(run):
    async def main():
        loop = asyncio.get_running_loop()
        async with opened() as device:
            wakes = []
            device.close(PATIENCE)
            device.open(CountingLoop(loop, wakes))
            landed = threading.Event()
            flight = device.forward.launch(lambda: 1, step=0, label="forward")
            device.forward.launch(landed.set, step=0, label="probe")
            assert landed.wait(PATIENCE)
            assert flight.done()
            assert await flight == 1
            assert wakes == []

            gate = threading.Event()
            flight = device.forward.launch(gate.wait, step=1, label="forward")
            waiting = [asyncio.create_task(wait_for(flight)) for _ in range(5)]
            await asyncio.sleep(0)
            gate.set()
            await asyncio.gather(*waiting)
            assert len(wakes) == 1

    async def wait_for(flight):
        await flight

    run(main())


class CountingLoop:
    """Stands before a loop and notes each wake-up from another thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, wakes: list[object]) -> None:
        self._loop = loop
        self._wakes = wakes

    def call_soon_threadsafe(self, callback):
        self._wakes.append(callback)
        return self._loop.call_soon_threadsafe(callback)

    def create_future(self):
        return self._loop.create_future()


def test_the_idle_worker_keeps_no_result_and_no_work_alive(run):
    async def main():
        async with opened() as device:
            for fails in (False, True):
                result, captured = Result(), Result()
                gone = [threading.Event(), threading.Event()]
                weakref.finalize(result, gone[0].set)
                weakref.finalize(captured, gone[1].set)

                def work(box=[result], captured=captured, fails=fails):  # noqa: B006
                    if fails:
                        raise ValueError("faulty")
                    return box.pop()

                flight = device.forward.launch(work, step=0, label="forward")
                if fails:
                    with pytest.raises(ValueError, match="faulty"):
                        await flight
                else:
                    await flight
                del result, captured, work, flight
                deadline = time.monotonic() + PATIENCE
                while not all(event.wait(0.01) for event in gone):  # until the worker is idle
                    assert time.monotonic() < deadline
                    if fails:
                        gc.collect()  # an exception and its traceback are a cycle

    run(main())


def test_time_stamps_are_ordered_on_the_clock_of_the_device(run):
    async def main():
        async with opened() as device:
            before = device.now()
            first = device.forward.launch(lambda: None, step=0, label="forward")
            second = device.copy.launch(lambda: None, step=0, label="copy")
            await second
            stamps = [before, first.started, first.finished, second.started, second.finished]
            assert stamps == sorted(stamps)
            assert second.finished <= device.now()
            assert first.device_seconds == first.finished - first.started

    run(main())


def test_close_fails_queued_work_and_joins_the_worker(run):
    async def main():
        async def wait(flight):
            return await flight

        async with opened() as device:
            started, gate = threading.Event(), threading.Event()
            ran = []

            def first_work():
                started.set()
                return gate.wait(PATIENCE)

            first = device.forward.launch(first_work, step=0, label="forward")
            queued = device.forward.launch(lambda: ran.append(1), step=1, label="forward")
            waiting = asyncio.create_task(wait(queued))
            await asyncio.sleep(0)
            assert started.wait(PATIENCE)
            timer = threading.Timer(0.01, gate.set)
            timer.start()
            device.close(PATIENCE)
            timer.join()
            assert await first is True
            with pytest.raises(DeviceClosed, match="step 1 'forward'"):
                await waiting
            assert ran == []
            assert "aiosched-cpu" not in {thread.name for thread in threading.enumerate()}
            with pytest.raises(DeviceClosed):
                device.forward.launch(lambda: None, step=2, label="forward")
            device.close(PATIENCE)

    run(main())


def test_close_gives_up_stuck_work_in_time_and_its_waiters_get_an_error(run, gate):
    async def main():
        async def wait(flight):
            return await flight

        device = CpuDevice()
        device.open(asyncio.get_running_loop())
        started = threading.Event()

        def stuck():
            started.set()
            gate.wait(PATIENCE)

        flights = [
            device.forward.launch(stuck, step=0, label="forward"),
            device.copy.launch(lambda: None, step=0, label="copy"),
        ]
        waiting = [asyncio.create_task(wait(flight)) for flight in flights]
        await asyncio.sleep(0)
        assert started.wait(PATIENCE)
        began = time.perf_counter()
        device.close(0.02)
        assert time.perf_counter() - began < PATIENCE / 2
        for task in waiting:
            with pytest.raises(DeviceClosed):
                await task
        (thread,) = [t for t in threading.enumerate() if t.name == "aiosched-cpu"]
        assert thread.daemon
        gate.set()
        thread.join(PATIENCE)
        assert not thread.is_alive()

    run(main())


def test_work_that_outlives_its_event_loop_is_harmless(gate):
    device = CpuDevice()
    started = threading.Event()

    def work():
        started.set()
        return gate.wait(PATIENCE)

    async def main():
        device.open(asyncio.get_running_loop())
        flight = device.forward.launch(work, step=0, label="forward")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(wait(flight)), 0.01)
        return flight

    async def wait(flight):
        return await flight

    flight = asyncio.run(main())
    assert started.wait(PATIENCE)
    gate.set()
    device.close(PATIENCE)
    assert flight.done()


def test_a_device_can_be_opened_again_on_another_loop():
    device = CpuDevice()

    async def main(n):
        device.open(asyncio.get_running_loop())
        with pytest.raises(RuntimeError, match="open already"):
            device.open(asyncio.get_running_loop())
        value = await device.forward.launch(lambda: n, step=0, label="forward")
        device.close(PATIENCE)
        return value

    assert [asyncio.run(main(n)) for n in (1, 2)] == [1, 2]


def test_the_number_of_torch_threads_is_set_for_the_worker_alone():
    import torch

    other = 3 if torch.get_num_threads() != 3 else 4

    async def main():
        async with opened(threads=other) as device:
            seen = device.forward.launch(torch.get_num_threads, step=0, label="forward")
            assert await seen == other
            # A thread that comes later starts with the number of the process.
            assert await asyncio.to_thread(torch.get_num_threads) == before
            assert torch.get_num_threads() == before

    before = torch.get_num_threads()
    asyncio.run(main())
    assert torch.get_num_threads() == before


def test_a_number_of_threads_below_one_is_refused():
    with pytest.raises(ValueError, match="threads=0"):
        CpuDevice(threads=0)
