"""Inbox: from any thread, at any time, and nothing runs while nothing comes."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest

from aiosched import SamplingParams
from aiosched.scheduler.inbox import Inbox
from aiosched.scheduler.reader import Reader
from aiosched.scheduler.requests import Family, Request


def request(name="job"):
    return Request(
        name,
        np.array([1, 2], dtype=np.int32),
        SamplingParams(),
        max_new=4,
        seed=0,
        stop_ids=frozenset(),
        reader=Reader(),
        family=Family(),
    )


async def asleep(inbox):
    task = asyncio.create_task(inbox.sleep())
    await asyncio.sleep(0)
    assert not task.done()
    return task


@pytest.mark.parametrize("verb", ["submit", "abort", "resume"])
def test_whatever_is_put_in_ends_the_sleep(run, verb):
    async def main():
        inbox = Inbox(asyncio.get_running_loop())
        sleeper = await asleep(inbox)
        getattr(inbox, verb)(request())
        await asyncio.wait_for(sleeper, 5)

    run(main())


@pytest.mark.parametrize("verb", ["submit", "abort", "resume"])
def test_what_came_before_the_sleep_prevents_it(run, verb):
    async def main():
        inbox = Inbox(asyncio.get_running_loop())
        getattr(inbox, verb)(request())
        sleep = inbox.sleep()
        with pytest.raises(StopIteration):
            sleep.send(None)

    run(main())


def test_an_abort_by_the_garbage_collector_on_the_way_to_sleep_is_not_slept_over():
    """Making the future may collect a stream that was dropped, whose finalizer aborts."""

    class Collecting(asyncio.SelectorEventLoop):
        inbox = None

        def create_future(self):
            if self.inbox is not None:
                self.inbox.abort(request())
            return super().create_future()

    loop = Collecting()

    async def main():
        inbox = Inbox(loop)
        loop.inbox = inbox
        sleep = inbox.sleep()
        with pytest.raises(StopIteration):
            sleep.send(None)
        loop.inbox = None

    try:
        loop.run_until_complete(main())
    finally:
        loop.close()


def test_a_wake_without_a_sleeper_and_a_second_wake_do_nothing(run):
    async def main():
        inbox = Inbox(asyncio.get_running_loop())
        inbox.wake()
        sleeper = await asleep(inbox)
        inbox.wake()
        inbox.wake()
        await asyncio.wait_for(sleeper, 5)

    run(main())


def test_a_cancelled_sleep_can_be_slept_again(run):
    async def main():
        inbox = Inbox(asyncio.get_running_loop())
        sleeper = await asleep(inbox)
        sleeper.cancel()
        await asyncio.wait({sleeper})
        inbox.wake()
        again = await asleep(inbox)
        inbox.submit(request())
        await asyncio.wait_for(again, 5)

    run(main())


def test_an_abort_from_another_thread_wakes_the_loop(run):
    async def main():
        inbox = Inbox(asyncio.get_running_loop())
        sleeper = await asleep(inbox)
        gone = request()
        thread = threading.Timer(0.02, inbox.abort, args=(gone,))  # the loop is in its select
        since = asyncio.get_running_loop().time()
        thread.start()
        await asyncio.wait_for(sleeper, 5)
        thread.join()
        assert asyncio.get_running_loop().time() - since < 4  # woken, not found at the timeout
        assert list(inbox.aborts) == [gone]

    run(main())


def test_a_callback_runs_at_once_on_the_loop_and_soon_from_elsewhere(run):
    async def main():
        inbox = Inbox(asyncio.get_running_loop())
        ran = []
        inbox.tell(lambda: ran.append(threading.get_ident()))
        assert ran == [threading.get_ident()]
        told = asyncio.Event()
        thread = threading.Thread(target=inbox.tell, args=(told.set,))
        thread.start()
        await asyncio.wait_for(told.wait(), 5)
        thread.join()

    run(main())


def test_after_the_loop_is_closed_an_abort_from_any_thread_is_silent(run):
    async def main():
        return Inbox(asyncio.get_running_loop())

    inbox = run(main())
    inbox.abort(request())
    thread = threading.Thread(target=inbox.abort, args=(request(),))
    thread.start()
    thread.join()
    assert len(inbox.aborts) == 2
