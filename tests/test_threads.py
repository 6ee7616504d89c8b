"""in_thread: off the loop, seen by virtual time, and gone afterwards."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Callable

import pytest
from conftest import Run

from aiosched._threads import in_thread
from aiosched.testing import VirtualClock

NAME = "aiosched-test"


def running() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == NAME]


def test_the_result_comes_from_a_thread_that_is_gone(run: Run) -> None:
    async def main() -> None:
        assert await in_thread(lambda: threading.current_thread().name, NAME) == NAME
        assert not running()

    run(main())


def test_an_error_comes_back_and_holds_nothing(run: Run) -> None:
    class Thing:
        pass

    def fails(thing: Thing) -> Callable[[], None]:
        def fn() -> None:
            raise LookupError(thing)

        return fn

    async def main() -> weakref.ref[Thing]:
        thing = Thing()
        try:
            await in_thread(fails(thing), NAME)
        except LookupError:
            return weakref.ref(thing)
        raise AssertionError

    gc.disable()
    try:
        held: list[weakref.ref[Thing]] = []

        async def keep() -> None:
            held.append(await main())

        run(keep())
        assert not running()
    finally:
        gc.enable()
    gc.collect()
    assert held[0]() is None


def test_a_cancelled_caller_waits_for_nothing(run: Run) -> None:
    gate = threading.Event()

    async def main() -> None:
        task = asyncio.ensure_future(in_thread(lambda: gate.wait(20), NAME))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert running()
        gate.set()

    run(main())
    for thread in threading.enumerate():
        if thread.name == NAME:
            thread.join(20)


def test_virtual_time_stands_while_the_thread_works() -> None:
    clock = VirtualClock()

    async def main() -> float:
        async with asyncio.timeout(1.0):  # a timer that could be jumped to
            await in_thread(lambda: time.sleep(0.05), NAME)
        return clock.time()

    assert clock.run(main()) == 0.0
