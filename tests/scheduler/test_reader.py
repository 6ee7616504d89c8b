"""Reader: asyncio's tasks wait on it as on a future, again and again."""

from __future__ import annotations

import asyncio
import contextvars

import pytest

from aiosched.errors import AioschedError
from aiosched.scheduler.reader import Reader, wake


async def turns(count=4):
    for _ in range(count):
        await asyncio.sleep(0)


def waiting(reader, log, name="reader"):
    async def main():
        try:
            await reader
        except asyncio.CancelledError:
            log.append(f"{name} cancelled")
            raise
        log.append(name)

    return asyncio.create_task(main())


def test_one_wake_up_wakes_all_who_wait_in_their_order(run):
    async def main():
        readers = [Reader(asyncio.get_running_loop()) for _ in range(3)]
        log = []
        tasks = [waiting(reader, log, i) for i, reader in enumerate(readers)]
        await turns()
        assert log == []
        wake(readers)
        await asyncio.gather(*tasks)
        assert log == [0, 1, 2]

    run(main())


def test_the_same_reader_is_awaited_again_and_again(run):
    async def main():
        reader, seen = Reader(asyncio.get_running_loop()), 0

        async def read():
            nonlocal seen
            for _ in range(5):
                await reader
                seen += 1

        task = asyncio.create_task(read())
        for expected in range(5):
            await turns()
            assert seen == expected
            wake([reader])
        await task

    run(main())


def test_a_wake_up_while_nobody_waits_is_not_kept(run):
    async def main():
        reader, log = Reader(asyncio.get_running_loop()), []
        wake([reader])
        reader.notify()
        task = waiting(reader, log)
        await turns()
        assert log == []
        reader.token()
        await task

    run(main())


def test_a_cancelled_reader_stops_waiting_and_the_next_one_can_wait(run):
    async def main():
        reader, log = Reader(asyncio.get_running_loop()), []
        task = waiting(reader, log, "first")
        await turns()
        task.cancel("enough")
        with pytest.raises(asyncio.CancelledError, match="enough"):
            await task
        second = waiting(reader, log, "second")
        await turns()
        wake([reader])
        await second
        assert log == ["first cancelled", "second"]

    run(main())


def test_a_task_can_be_cancelled_by_one_that_was_woken_just_before_it(run):
    async def main():
        loop, log = asyncio.get_running_loop(), []
        readers = [Reader(loop), Reader(loop), Reader(loop)]
        victim = None

        async def killer():
            await readers[0]
            victim.cancel()

        first = asyncio.create_task(killer())
        victim = waiting(readers[1], log, "victim")
        last = waiting(readers[2], log, "last")
        await turns()
        wake(readers)
        await asyncio.wait([first, victim, last])
        assert sorted(log) == ["last", "victim cancelled"]
        assert victim.cancelled()

    run(main())


def test_a_task_that_was_woken_and_then_cancelled_ends_as_cancelled(run):
    async def main():
        reader, log = Reader(asyncio.get_running_loop()), []
        task = waiting(reader, log)
        await turns()
        reader.token()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert log == ["reader cancelled"]

    run(main())


def test_who_wants_the_end_is_not_woken_by_tokens(run):
    async def main():
        reader, log = Reader(asyncio.get_running_loop()), []
        reader.whole = True
        task = waiting(reader, log)
        await turns()
        reader.token()
        wake([reader])
        await turns()
        assert log == []
        reader.notify()
        await task

    run(main())


def test_a_second_task_may_not_wait(run):
    async def main():
        reader, log = Reader(asyncio.get_running_loop()), []
        task = waiting(reader, log)
        await turns()
        with pytest.raises(AioschedError, match="another task"):
            await reader
        wake([reader])
        await task

    run(main())


def test_each_task_runs_in_its_own_context(run):
    name = contextvars.ContextVar("name")

    async def main():
        loop, seen = asyncio.get_running_loop(), []

        async def read(reader, value):
            name.set(value)
            await reader
            seen.append(name.get())

        readers = [Reader(loop), Reader(loop)]
        tasks = [asyncio.create_task(read(r, i)) for i, r in enumerate(readers)]
        await turns()
        wake(readers)
        await asyncio.gather(*tasks)
        assert seen == [0, 1]

    run(main())


def test_a_task_of_another_loop_cannot_wait(run):
    async def main():
        other = asyncio.new_event_loop()
        try:
            with pytest.raises(RuntimeError, match=r"different loop|another loop"):
                await Reader(other)
        finally:
            other.close()

    run(main())


def test_an_exception_that_ends_the_program_leaves_nobody_asleep():
    """The loop passes KeyboardInterrupt on at once; a program may catch it and run the loop on."""
    log = []
    loop = asyncio.new_event_loop()
    try:
        readers = [Reader(loop), Reader(loop)]

        async def interrupted():
            await readers[0]
            raise KeyboardInterrupt

        async def start():
            tasks = [asyncio.create_task(interrupted()), waiting(readers[1], log)]
            await turns()
            return tasks

        async def wake_both():
            wake(readers)
            await turns()

        tasks = loop.run_until_complete(start())
        with pytest.raises(KeyboardInterrupt):
            loop.run_until_complete(wake_both())
        loop.run_until_complete(tasks[1])
        assert log == ["reader"]
        with pytest.raises(KeyboardInterrupt):
            tasks[0].result()
    finally:
        loop.close()
