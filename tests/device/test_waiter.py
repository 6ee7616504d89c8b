from __future__ import annotations

import asyncio
import os
import threading
import weakref

import pytest

from aiosched.device.waiter import EventWaiter

PATIENCE = 10.0


class Event:
    """An event of which the test decides when it fires."""

    def __init__(self, error: Exception | None = None) -> None:
        self.fire = threading.Event()
        self.error = error

    def synchronize(self) -> None:
        assert self.fire.wait(PATIENCE)
        if self.error is not None:
            raise self.error


class Reports(list):
    """Collects what the waiter reports, and by which thread."""

    def __init__(self) -> None:
        self.arrived = asyncio.Event()
        self.threads = set()

    def __call__(self, key, error) -> None:
        self.append((key, error))
        self.threads.add(threading.current_thread())
        self.arrived.set()

    async def until(self, count: int) -> None:
        async with asyncio.timeout(PATIENCE):
            while len(self) < count:
                self.arrived.clear()
                await self.arrived.wait()


@pytest.fixture(params=["eventfd", "no eventfd", "no add_reader"])
def signal(request, monkeypatch):
    """The ways in which the thread may reach the loop."""

    def refuse(self, *args):
        raise NotImplementedError

    if request.param == "no eventfd":
        monkeypatch.delattr(os, "eventfd", raising=False)
    elif not hasattr(os, "eventfd"):
        pytest.skip("this platform has no eventfd")
    elif request.param == "no add_reader":
        monkeypatch.setattr(asyncio.SelectorEventLoop, "add_reader", refuse)
    return request.param


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else set()


def test_events_are_reported_on_the_loop_in_the_order_of_watching(run, signal):
    async def main():
        reports = Reports()
        waiter = EventWaiter(asyncio.get_running_loop(), reports)
        waiter.start()
        events = [Event() for _ in range(3)]
        for key, event in enumerate(events):
            waiter.watch(key, event)
        events[2].fire.set()
        events[0].fire.set()
        await reports.until(1)
        assert reports == [(0, None)]
        events[1].fire.set()
        await reports.until(3)
        assert reports == [(0, None), (1, None), (2, None)]
        assert reports.threads == {threading.current_thread()}
        assert waiter.close(PATIENCE)

    run(main())


def test_an_error_of_an_event_is_reported_and_the_thread_goes_on(run):
    async def main():
        reports = Reports()
        waiter = EventWaiter(asyncio.get_running_loop(), reports)
        waiter.start()
        error = RuntimeError("an illegal memory access was encountered")
        bad, good = Event(error), Event()
        waiter.watch("bad", bad)
        waiter.watch("good", good)
        bad.fire.set()
        good.fire.set()
        await reports.until(2)
        assert reports == [("bad", error), ("good", None)]
        assert waiter.close(PATIENCE)

    run(main())


def test_the_idle_thread_keeps_no_event_alive(run):
    async def main():
        reports = Reports()
        waiter = EventWaiter(asyncio.get_running_loop(), reports)
        waiter.start()
        event = Event()
        gone = threading.Event()
        weakref.finalize(event, gone.set)
        waiter.watch("key", event)
        event.fire.set()
        del event
        assert gone.wait(PATIENCE)
        assert waiter.close(PATIENCE)

    run(main())


def test_close_reports_what_has_fired_and_leaves_no_thread_and_no_descriptor(run, signal):
    async def main():
        before = descriptors()
        reports = Reports()
        waiter = EventWaiter(asyncio.get_running_loop(), reports)
        waiter.start()
        event = Event()
        event.fire.set()
        waiter.watch("last", event)
        assert waiter.close(PATIENCE)
        assert reports == [("last", None)]
        assert "aiosched-events" not in {thread.name for thread in threading.enumerate()}
        assert descriptors() == before

    run(main())


def test_close_leaves_a_stuck_thread_behind_in_time(run):
    async def main():
        reports = Reports()
        waiter = EventWaiter(asyncio.get_running_loop(), reports)
        waiter.start()
        stuck = Event()
        waiter.watch("stuck", stuck)
        assert not waiter.close(0.01)
        assert reports == []
        stuck.fire.set()
        waiter._thread.join(PATIENCE)
        assert not waiter._thread.is_alive()

    run(main())


def test_an_event_that_fires_after_the_loop_is_closed_is_harmless(signal):
    loop = asyncio.new_event_loop()
    reports = []
    waiter = EventWaiter(loop, lambda key, error: reports.append(key))
    waiter.start()
    loop.close()
    event = Event()
    event.fire.set()
    waiter.watch("late", event)
    assert waiter.close(PATIENCE)
    assert reports == ["late"]


def test_the_thread_prepares_itself_first():
    async def main():
        names = []
        waiter = EventWaiter(
            asyncio.get_running_loop(),
            lambda key, error: None,
            lambda: names.append(threading.current_thread().name),
        )
        waiter.start()
        assert waiter.close(PATIENCE)
        return names

    assert asyncio.run(main()) == ["aiosched-events"]
