"""A CPU as a device: one worker thread that runs launches in their order."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from aiosched.device.stream import DeviceClosed, InFlight, attempt, closed_before

T = TypeVar("T")


class _Work:
    """A launch on its way to the worker."""

    __slots__ = ("after", "flight", "fn")

    def __init__(
        self, flight: InFlight[Any], fn: Callable[[], Any], after: Sequence[InFlight[Any]]
    ) -> None:
        self.flight = flight
        self.fn = fn
        self.after = after

    def run(self) -> bool:
        """Run ``fn`` and record its outcome. True if the loop must be woken."""
        flight = self.flight
        flight.started = time.perf_counter()
        value, error = attempt(self.fn, self.after)
        flight.finished = time.perf_counter()
        return flight._finish(value, error)

    def give_up(self) -> bool:
        """Fail it because the device closes. True if the loop must wake its waiters."""
        return self.flight._finish(None, closed_before(self.flight))


class _Worker:
    """The thread and its queue, from one ``open`` to its ``close``."""

    def __init__(self, loop: asyncio.AbstractEventLoop, threads: int | None) -> None:
        self.loop = loop
        self._queue: SimpleQueue[_Work | None] = SimpleQueue()
        self._current: _Work | None = None
        self._closing = False
        self._threads = threads
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="aiosched-cpu", daemon=True)

    def start(self) -> None:
        if self._threads is None:
            self._thread.start()
            return
        # torch keeps a number of intra-op threads per calling thread, and beside it one for the
        # process, which threads yet to come begin with. The worker's choice is for itself alone,
        # so the process gets its number back.
        import torch

        of_process = torch.get_num_threads()
        self._thread.start()
        self._ready.wait()
        torch.set_num_threads(of_process)

    def put(self, work: _Work) -> None:
        self._queue.put(work)

    def close(self, timeout: float) -> None:
        self._closing = True
        self._queue.put(None)
        self._thread.join(timeout)
        if self._thread.is_alive():  # stuck in some fn: the daemon is left behind, nobody waits
            if (stuck := self._current) is not None and stuck.give_up():
                stuck.flight._wake()
            with contextlib.suppress(Empty):
                while True:
                    work = self._queue.get_nowait()
                    if work is not None and work.give_up():
                        work.flight._wake()
            self._queue.put(None)

    def _serve(self) -> None:
        if self._threads is not None:
            self._limit_torch(self._threads)
        while (work := self._queue.get()) is not None:
            self._current = work
            must_wake = work.give_up() if self._closing else work.run()
            if must_wake:
                with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
                    self.loop.call_soon_threadsafe(work.flight._wake)
            # An idle worker must not keep the last result alive.
            self._current = None
            del work

    def _limit_torch(self, threads: int) -> None:
        import torch

        try:
            torch.get_num_threads()  # a thread adopts the number of the process at its first use
            torch.set_num_threads(threads)
        finally:
            self._ready.set()


class CpuStream:
    """One of the streams of a ``CpuDevice``: a name over the worker that all of them share."""

    def __init__(self, device: CpuDevice, name: str) -> None:
        self.name = name
        self._device = device

    def launch(
        self,
        fn: Callable[[], T],
        *,
        step: int,
        label: str,
        after: Sequence[InFlight[Any]] = (),
        reads: Sequence[object] = (),
        writes: Sequence[object] = (),
    ) -> InFlight[T]:
        """Queue ``fn``. ``after`` was launched earlier, so the order of launches satisfies it."""
        worker = self._device._worker
        if worker is None:
            raise DeviceClosed("the CPU device is not open")
        flight: InFlight[T] = InFlight(step, label, worker.loop)
        worker.put(_Work(flight, fn, after))
        return flight


class CpuDevice:
    """Runs device work in a thread, so that the event loop goes on while torch computes.

    torch drops the GIL inside its kernels; that is where the overlap comes from.

    Args:
        threads: torch's intra-op threads for the worker. The setting holds for the worker alone.
            ``None`` leaves torch's own choice, one for each core. The event loop then takes its
            time from one of them, which costs less than a core left to it would: SmolLM2 decodes
            1.2 to 1.4 times as fast with both of two cores as with one, at any batch.
    """

    kind = "cpu"
    torch_device = "cpu"

    def __init__(self, threads: int | None = None) -> None:
        if threads is not None and threads < 1:
            raise ValueError(f"threads={threads}: must be at least 1")
        self.schedule = CpuStream(self, "schedule")
        self.forward = CpuStream(self, "forward")
        self.copy = CpuStream(self, "copy")
        self._threads = threads
        self._worker: _Worker | None = None

    def open(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start the worker thread."""
        if self._worker is not None:
            raise RuntimeError("the CPU device is open already")
        self._worker = _Worker(loop, self._threads)
        self._worker.start()

    def close(self, timeout: float) -> None:
        """Fail what is queued with ``DeviceClosed`` and join the worker.

        Work that is still running after ``timeout`` seconds is given up: its waiters get the
        error, and a daemon thread is left behind with it.
        """
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close(timeout)

    def now(self) -> float:
        return time.perf_counter()

    def host_access(self, *, reads: Sequence[object] = (), writes: Sequence[object] = ()) -> None:
        """Nothing to check here: ``SimDevice`` does."""
