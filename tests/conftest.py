"""How tests run coroutines: on every event loop, or in virtual time.

``run(coro)`` runs the test once on asyncio and once on uvloop; ``vrun(coro)`` runs it in virtual
time. Both fail the test if it leaves a task behind or if the loop has to report an exception that
nobody fetched.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

import pytest

from aiosched.testing.clock import VirtualClock

T = TypeVar("T")


class Run(Protocol):
    def __call__(self, coro: Coroutine[Any, Any, T]) -> T: ...


def loop_factory(name: str) -> Callable[[], asyncio.AbstractEventLoop]:
    if name == "uvloop":
        return pytest.importorskip("uvloop").new_event_loop
    return asyncio.new_event_loop


async def strictly(coro: Coroutine[Any, Any, T]) -> T:
    """Await ``coro`` and fail if it leaves tasks or unhandled exceptions behind."""
    reports: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: reports.append(context))
    result = await coro
    leftovers = asyncio.all_tasks() - {asyncio.current_task()}
    assert not leftovers, f"tasks left pending: {leftovers}"
    if reports:
        pytest.fail("\n".join(f"the event loop reported: {report}" for report in reports))
    return result


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    """Runs a coroutine on a fresh event loop, of each kind in turn."""

    def runner(coro: Coroutine[Any, Any, T]) -> T:
        with asyncio.Runner(debug=False, loop_factory=loop_factory(request.param)) as on:
            return on.run(strictly(coro))

    return runner


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def vrun(clock: VirtualClock) -> Run:
    """Runs a coroutine in the virtual time of ``clock``."""

    def runner(coro: Coroutine[Any, Any, T]) -> T:
        return clock.run(strictly(coro))

    return runner
