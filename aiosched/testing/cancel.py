"""Cancel a coroutine at its n-th suspension, for every n.

A coroutine can be cancelled wherever it suspends and nowhere else. So a test that cancels it at
each of its suspensions in turn has tried every place there is:

    for n in itertools.count(1):
        outcome = await cancel_at(scenario(), n)
        assert_baseline()
        if not outcome.reached:
            break
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Outcome(Generic[T]):
    """How a coroutine ended that was to be cancelled.

    Attributes:
        reached: it came to its n-th suspension, so the cancel took place.
        cancelled: it ended by the cancellation. False where it swallowed it.
        suspensions: how often it suspended in all, its cleanup included.
        value: what it returned, if it returned.
        error: what it raised, other than the cancellation.
    """

    reached: bool
    cancelled: bool
    suspensions: int
    value: T | None = None
    error: BaseException | None = None


async def cancel_at(coro: Coroutine[Any, Any, T], n: int, *, late: bool = False) -> Outcome[T]:
    """Run ``coro`` in a task of its own and cancel that task at its n-th suspension (from 1).

    Args:
        late: cancel when what it waits for has arrived and before it can take it, where a careless
            coroutine loses the value. By default it is cancelled the moment it suspends.
    """
    if n < 1:
        raise ValueError(f"n={n}: suspensions are counted from 1")
    return await _run(coro, n, late)


async def count_suspensions(coro: Coroutine[Any, Any, object]) -> int:
    """Run ``coro`` to its end and return how often it suspended. Raises what it raises."""
    outcome = await _run(coro, 0, False)
    if outcome.error is not None:
        raise outcome.error
    return outcome.suspensions


async def _run(coro: Coroutine[Any, Any, T], n: int, late: bool) -> Outcome[T]:
    watched = _Watched(coro, n, late)

    async def drive() -> T:
        return await watched

    task = asyncio.ensure_future(drive())
    try:
        await asyncio.wait([task])
    except asyncio.CancelledError:
        task.cancel()
        raise
    reached = 0 < n <= watched.suspensions
    if task.cancelled():
        return Outcome(reached, True, watched.suspensions)
    error = task.exception()
    value = None if error is not None else task.result()
    return Outcome(reached, False, watched.suspensions, value, error)


class _Watched(Generic[T]):
    """Awaits a coroutine as ``yield from`` would, and counts what it yields to the event loop."""

    def __init__(self, coro: Coroutine[Any, Any, T], n: int, late: bool) -> None:
        self.suspensions = 0
        self._coro = coro
        self._n = n
        self._late = late

    def __await__(self) -> Generator[Any, Any, T]:
        inner = self._coro.__await__()
        resume: Callable[[], Any] = partial(next, inner)
        while True:
            try:
                awaited = resume()
            except StopIteration as stop:
                return stop.value  # type: ignore[no-any-return]
            self.suspensions += 1
            if self.suspensions == self._n:
                awaited = self._cancel(awaited)
            try:
                sent = yield awaited
            except GeneratorExit:
                inner.close()
                raise
            except BaseException as error:
                resume = partial(inner.throw, error)
            else:
                resume = partial(inner.send, sent)

    def _cancel(self, awaited: Any) -> Any:
        """Have the task cancelled. Returns what it is to wait for now."""
        task = asyncio.current_task()
        assert task is not None
        if not self._late:
            task.cancel()  # takes effect at the suspension that is about to happen
        elif awaited is None:  # asyncio.sleep(0) waits for nothing but its turn
            asyncio.get_running_loop().call_soon(task.cancel)
        else:
            # The task waits for a stand-in that never comes. So only the cancel wakes it, and that
            # comes when the real thing does. (What tasks wait for need not take a second callback.)
            standin: Any = asyncio.get_running_loop().create_future()
            standin._asyncio_future_blocking, awaited._asyncio_future_blocking = True, False
            awaited.add_done_callback(lambda _: task.cancel())
            return standin
        return awaited
