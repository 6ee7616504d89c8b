from __future__ import annotations

import asyncio
import itertools

import pytest

from aiosched.testing.cancel import cancel_at, count_suspensions


async def three_suspensions(log):
    try:
        await asyncio.sleep(0)
        log.append("first")
        await asyncio.sleep(0.001)
        log.append("second")
        future = asyncio.get_running_loop().create_future()
        future.get_loop().call_soon(lambda: future.done() or future.set_result("third"))
        log.append(await future)
        return "end"
    finally:
        log.append("cleanup")


def test_suspensions_are_counted(run):
    async def main():
        assert await count_suspensions(three_suspensions([])) == 3
        assert await count_suspensions(nothing()) == 0

    async def nothing():
        pass

    run(main())


@pytest.mark.parametrize("late", [False, True])
def test_the_coroutine_is_cancelled_exactly_where_it_is_told(run, late):
    async def main():
        for n, expected in [
            (1, ["cleanup"]),
            (2, ["first", "cleanup"]),
            (3, ["first", "second", "cleanup"]),
        ]:
            log = []
            outcome = await cancel_at(three_suspensions(log), n, late=late)
            assert log == expected
            assert outcome.reached
            assert outcome.cancelled
            assert outcome.suspensions == n

    run(main())


def test_a_coroutine_that_ends_before_is_not_cancelled(run):
    async def main():
        log = []
        outcome = await cancel_at(three_suspensions(log), 4)
        assert not outcome.reached
        assert not outcome.cancelled
        assert outcome.value == "end"
        assert log == ["first", "second", "third", "cleanup"]

    run(main())


@pytest.mark.parametrize("late", [False, True])
def test_a_late_cancel_comes_when_the_value_is_there_and_before_it_is_taken(run, late):
    async def main():
        loop = asyncio.get_running_loop()
        box = loop.create_future()

        async def take():
            loop.call_soon(lambda: box.done() or box.set_result("item"))
            return await box

        outcome = await cancel_at(take(), 1, late=late)
        assert outcome.cancelled
        assert box.cancelled() is not late
        assert not late or box.result() == "item"

    run(main())


def test_a_swallowed_cancel_and_an_error_in_cleanup_are_told_apart(run):
    async def swallows():
        try:
            await asyncio.sleep(10)
        except asyncio.CancelledError:
            return "swallowed"

    async def fails():
        try:
            await asyncio.sleep(10)
        finally:
            raise ValueError("cleanup")

    async def main():
        outcome = await cancel_at(swallows(), 1)
        assert (outcome.reached, outcome.cancelled, outcome.value) == (True, False, "swallowed")
        outcome = await cancel_at(fails(), 1)
        assert (outcome.reached, outcome.cancelled) == (True, False)
        assert isinstance(outcome.error, ValueError)

    run(main())


def test_suspensions_of_the_cleanup_count_and_are_not_cancelled(run):
    async def main():
        log = []

        async def careful():
            try:
                await asyncio.sleep(10)
            finally:
                await asyncio.sleep(0)
                log.append("closed")

        outcome = await cancel_at(careful(), 1)
        assert outcome.cancelled
        assert outcome.suspensions == 2
        assert log == ["closed"]

    run(main())


def test_the_loop_over_all_suspensions_finds_the_one_that_leaks(run):
    async def main():
        held = set()

        async def leaky():
            held.add("a")
            try:
                await asyncio.sleep(0)
            finally:
                held.discard("a")
            held.add("b")
            await asyncio.sleep(0)  # a cancel here keeps b
            held.discard("b")

        leaks = []
        for n in itertools.count(1):
            outcome = await cancel_at(leaky(), n)
            if held:
                leaks.append(n)
                held.clear()
            if not outcome.reached:
                break
        assert leaks == [2]
        assert n == 3

    run(main())


def test_errors_and_values_pass_through_an_ordinary_run(run):
    async def raises():
        await asyncio.sleep(0)
        raise KeyError("x")

    async def main():
        with pytest.raises(KeyError):
            await count_suspensions(raises())
        with pytest.raises(ValueError, match="from 1"):
            await cancel_at(closed := three_suspensions([]), 0)
        closed.close()

    run(main())
