"""A clock that jumps: an event loop on which waiting for time costs none.

Whenever nothing is runnable and no I/O is ready, time moves to the next timer. ``asyncio.sleep``,
timeouts and ``loop.call_later`` all keep their order and their exact instants, so an hour of
traffic takes as long as its Python code, and runs the same way every time.
"""

from __future__ import annotations

import asyncio
import math
import selectors
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import Executor
from pathlib import Path
from types import CoroutineType
from typing import Any, TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

# How many real seconds a thread may take before the clock stops waiting for it.
PATIENCE = 5.0

# Timers that are due within so many seconds fire together.
RESOLUTION = 1e-9


class Deadlock(RuntimeError):
    """Nothing is runnable and nothing is scheduled, so the program would wait for ever."""


class VirtualClock:
    """Runs coroutines in virtual time.

    Args:
        threads: real threads may wake the loop (``call_soon_threadsafe``). The clock then gives
            them ``grace`` real seconds before each jump. Work in executors (``asyncio.to_thread``)
            is waited for in any case; and before it reports a deadlock the clock waits some seconds
            for threads that were started since.
        grace: real seconds.
        start: what the clock shows at first, in seconds.
    """

    def __init__(self, threads: bool = False, grace: float = 0.02, start: float = 0.0) -> None:
        self._threads = threads
        self._grace = grace
        self._now = start

    def time(self) -> float:
        """Virtual seconds: ``loop.time()`` of the loop that runs, or where the last one stopped."""
        return self._now

    def spend(self, seconds: float) -> None:
        """Let time pass as a blocking call does: nobody else runs, and timers are late after it."""
        self._now += seconds

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        """Run ``main`` to its end on a new loop and clean up as ``asyncio.run`` does.

        Raises ``Deadlock``, which names the tasks that wait.
        """
        with asyncio.Runner(debug=False, loop_factory=lambda: _VirtualLoop(self)) as runner:
            return runner.run(main)

    def _wait(
        self,
        loop: _VirtualLoop,
        select: Callable[[float | None], _Ready],
        timeout: float | None,
    ) -> _Ready:
        """Wait ``timeout`` seconds (``None``: no timer is set) as the loop asks its selector to."""
        if ready := select(0.0):
            return ready
        if timeout is not None and timeout <= 0.0:
            return []
        real = 0.0
        if loop.in_threads:
            real = PATIENCE
        elif self._threads or (timeout is None and threading.active_count() > loop.threads_before):
            real = PATIENCE if timeout is None else self._grace
        if real > 0.0 and (ready := select(real)):
            return ready
        if timeout is None:
            raise Deadlock(_who_waits(loop))
        self._now += timeout
        return []


_Ready = list[tuple[selectors.SelectorKey, int]]


class _VirtualLoop(asyncio.SelectorEventLoop):
    _clock_resolution: float

    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock
        self.in_threads = 0  # pieces of executor work that have not come back
        self.threads_before = threading.active_count()
        super().__init__(_VirtualSelector(self))

    def time(self) -> float:
        return self.clock.time()

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[*Ts], T], *args: *Ts
    ) -> asyncio.Future[T]:
        future = super().run_in_executor(executor, func, *args)
        self.in_threads += 1
        future.add_done_callback(self._came_back)
        return future

    def _came_back(self, _: object) -> None:
        self.in_threads -= 1

    async def shutdown_default_executor(self, *timeout: Any) -> None:
        # It waits for a thread of its own.
        self.in_threads += 1
        try:
            await super().shutdown_default_executor(*timeout)
        finally:
            self.in_threads -= 1


class _VirtualSelector(selectors.BaseSelector):
    """The loop's only place to wait. Real I/O still works, and goes before a jump."""

    def __init__(self, loop: _VirtualLoop) -> None:
        self._loop = loop
        self._real = selectors.DefaultSelector()

    def select(self, timeout: float | None = None) -> _Ready:
        loop = self._loop
        ready = loop.clock._wait(loop, self._real.select, timeout)
        # The loop fires what is due before now + resolution. From 2**24 s on a nanosecond is less
        # than half of what tells two floats apart: the sum is now, and what is due now never fires.
        loop._clock_resolution = max(RESOLUTION, math.ulp(loop.time()))
        return ready

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._real.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._real.unregister(fileobj)

    def modify(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._real.modify(fileobj, events, data)

    def close(self) -> None:
        self._real.close()

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._real.get_map()


def _who_waits(loop: asyncio.AbstractEventLoop) -> str:
    lines = ["nothing is runnable and no timer is set, but these tasks wait:"]
    for task in sorted(asyncio.all_tasks(loop), key=lambda task: task.get_name()):
        lines.append(f"  {task.get_name()}: {' > '.join(_frames(task.get_coro()))}")
    return "\n".join(lines)


def _frames(awaited: object) -> Iterator[str]:
    """Where a suspended coroutine stands, from its outermost call to the innermost."""
    while isinstance(awaited, CoroutineType) and (frame := awaited.cr_frame) is not None:
        name = awaited.__qualname__.rpartition("<locals>.")[2]
        yield f"{name} ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"
        awaited = awaited.cr_await
