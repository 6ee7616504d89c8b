"""Two keepers of a simulated device's time: the event loop, or a thread that sleeps precisely.

Whatever changes the state of the device runs where its keeper runs callbacks: on the loop, or in
the thread. So the device needs no lock.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Protocol

# The kernel may wake a sleeper this many seconds late. The thread sleeps up to here and spins the
# rest away, dropping the GIL at every turn.
SPIN = 150e-6


class TimeKeeper(Protocol):
    """Runs callbacks at their time, in order."""

    def start(self) -> None: ...

    def stop(self, timeout: float) -> None:
        """Drop all callbacks that have not run."""

    def now(self) -> float:
        """Seconds."""

    def run(self, callback: Callable[[], None]) -> None:
        """Run it now (loop), or in the thread after what was given before."""

    def at(self, when: float, callback: Callable[[], None]) -> None:
        """Run it at ``when``, never within this call."""

    def tell_loop(self, callback: Callable[[], None]) -> None:
        """Run it on the event loop."""


class LoopTime:
    """The time of the event loop, which may be virtual. Everything runs on the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._handles: dict[int, asyncio.Handle] = {}
        self._numbers = itertools.count()

    def start(self) -> None:
        pass

    def stop(self, timeout: float) -> None:
        for handle in self._handles.values():
            handle.cancel()
        self._handles.clear()

    def now(self) -> float:
        return self._loop.time()

    def run(self, callback: Callable[[], None]) -> None:
        callback()

    def at(self, when: float, callback: Callable[[], None]) -> None:
        number = next(self._numbers)

        def fire() -> None:
            del self._handles[number]
            callback()

        if when <= self._loop.time():
            self._handles[number] = self._loop.call_soon(fire)
        else:
            self._handles[number] = self._loop.call_at(when, fire)

    def tell_loop(self, callback: Callable[[], None]) -> None:
        callback()


class RealTime:
    """A daemon thread that keeps appointments to some 50 microseconds.

    While another thread computes in Python, an appointment can be late by the interpreter's switch
    interval (5 ms).
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._queue: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._appointments: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()  # equal times keep their order
        self._stopped = False
        self._thread = threading.Thread(target=self._serve, name="aiosched-sim", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout: float) -> None:
        self._stopped = True
        self._queue.put(lambda: None)
        self._thread.join(timeout)

    def now(self) -> float:
        return time.perf_counter()

    def run(self, callback: Callable[[], None]) -> None:
        self._queue.put(callback)

    def at(self, when: float, callback: Callable[[], None]) -> None:
        """In the thread only: a callback that ``run`` or ``at`` runs may call it."""
        heapq.heappush(self._appointments, (when, next(self._numbers), callback))

    def tell_loop(self, callback: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is there to be told
            self._loop.call_soon_threadsafe(callback)

    def _serve(self) -> None:
        while not self._stopped:
            self._next()()

    def _next(self) -> Callable[[], None]:
        """The next callback, when it is due."""
        while self._appointments:
            early = self._appointments[0][0] - time.perf_counter()
            with contextlib.suppress(Empty):
                if early > SPIN:
                    return self._queue.get(timeout=early - SPIN)
                return self._queue.get_nowait()
            if early <= 0:
                return heapq.heappop(self._appointments)[2]
            if early <= SPIN:
                time.sleep(0)
        return self._queue.get()
