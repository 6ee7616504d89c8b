from __future__ import annotations

import asyncio
import re
import socket
import threading
import time

import pytest

from aiosched.testing.clock import Deadlock, VirtualClock


def test_an_hour_passes_at_once_and_exactly(clock):
    async def main():
        loop = asyncio.get_running_loop()
        await asyncio.sleep(3600)
        return loop.time()

    began = time.perf_counter()
    assert clock.run(main()) == 3600
    assert clock.time() == 3600
    assert time.perf_counter() - began < 5


def test_timers_fire_in_order_at_their_instants(clock):
    async def main():
        fired = []
        loop = asyncio.get_running_loop()
        for delay in (3, 1, 2, 1):
            loop.call_later(delay, lambda d=delay: fired.append((d, loop.time())))
        await asyncio.sleep(10)
        return fired

    assert clock.run(main()) == [(1, 1), (1, 1), (2, 2), (3, 3)]


def test_time_stands_still_while_something_is_runnable(clock):
    async def main():
        sleeper = asyncio.create_task(asyncio.sleep(1))
        for _ in range(1000):
            await asyncio.sleep(0)
            assert clock.time() == 0
        await sleeper
        assert clock.time() == 1

    clock.run(main())


def test_timeouts_are_virtual(clock):
    async def main():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(100):
                await asyncio.Event().wait()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.sleep(60), 50)
        return clock.time()

    assert clock.run(main()) == 150


def test_the_same_program_takes_the_same_course_every_time():
    async def main():
        order = []

        async def worker(name, period):
            for _ in range(50):
                await asyncio.sleep(period)
                order.append((name, asyncio.get_running_loop().time()))

        await asyncio.gather(*(worker(i, 0.1 + i / 7) for i in range(5)))
        return order

    assert VirtualClock().run(main()) == VirtualClock().run(main())


def test_a_deadlock_is_an_error_that_names_the_tasks_and_where_they_wait(clock):
    async def waits_for_ever():
        await asyncio.Event().wait()

    async def main():
        child = asyncio.create_task(waits_for_ever(), name="the child")
        await asyncio.sleep(1)
        await child

    with pytest.raises(Deadlock) as caught:
        clock.run(main())
    message = str(caught.value)
    assert re.search(r"the child: waits_for_ever \(test_clock.py:\d+\) > Event.wait \(", message)
    assert "main (test_clock.py:" in message


def test_leftover_tasks_are_cancelled_and_cleaned_up_after_the_end(clock):
    log = []

    async def background():
        try:
            await asyncio.sleep(1000)
        finally:
            await asyncio.sleep(1)
            log.append("closed")

    async def main():
        log.append(asyncio.create_task(background()))
        await asyncio.sleep(1)

    clock.run(main())
    assert log[0].cancelled()
    assert log[1:] == ["closed"]


def test_async_generators_are_closed_after_the_end(clock):
    log = []

    async def numbers():
        try:
            while True:
                yield 1
        finally:
            log.append("closed")

    async def main():
        generator = numbers()
        await anext(generator)
        log.append(generator)

    clock.run(main())
    assert log[1:] == ["closed"]


def test_an_error_of_the_main_coroutine_arrives_unchanged(clock):
    async def main():
        await asyncio.sleep(1)
        raise KeyError("here")

    with pytest.raises(KeyError, match="here"):
        clock.run(main())


def test_executor_work_is_waited_for_and_takes_no_virtual_time(clock):
    release = threading.Event()

    async def main():
        asyncio.get_running_loop().call_later(1000, release.set)
        timer = threading.Timer(0.02, release.set)
        timer.start()
        assert await asyncio.to_thread(release.wait, 10)
        timer.join()
        return clock.time()

    assert clock.run(main()) == 0


def test_real_threads_can_wake_the_loop_if_the_clock_is_told_of_them():
    clock = VirtualClock(threads=True)

    async def main():
        loop = asyncio.get_running_loop()
        woken = asyncio.Event()
        thread = threading.Timer(0.01, loop.call_soon_threadsafe, [woken.set])
        thread.start()
        await woken.wait()  # no timer is set: the clock waits for the thread
        thread.join()
        await asyncio.sleep(5)
        return clock.time()

    assert clock.run(main()) == 5


def test_real_input_goes_before_a_jump_in_time(clock):
    async def main():
        reader, writer = await asyncio.open_connection(sock=ours)
        await asyncio.sleep(1)
        theirs.sendall(b"hello")
        assert await asyncio.wait_for(reader.readexactly(5), 10) == b"hello"
        writer.close()
        await writer.wait_closed()
        return clock.time()

    ours, theirs = socket.socketpair()
    with theirs:
        assert clock.run(main()) == 1


@pytest.mark.parametrize("start", [2.0**24, 1e9, 2.0**53])
def test_timers_fire_however_late_it_is(start):
    clock = VirtualClock(start=start)

    async def main():
        await asyncio.sleep(0.3)
        await asyncio.sleep(3)

    clock.run(main())
    assert clock.time() == pytest.approx(start + 3.3, abs=1)


def test_the_clock_goes_on_from_where_the_last_run_stopped():
    clock = VirtualClock(start=100.0)
    clock.run(asyncio.sleep(1))
    clock.run(asyncio.sleep(2))
    assert clock.time() == 103
