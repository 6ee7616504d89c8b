"""CUDA streams as streams of a device, and CUDA events as awaitables.

``launch`` runs ``fn`` at once on the loop: kernels are enqueued, not executed. So the value exists
(as tensors that the device will fill) from the launch on, and landing means that the event behind
it has fired. The price is that the loop stands still while ``fn`` enqueues: a forward without a
CUDA graph is hundreds of kernels. A thread for launches would compete with the loop for the
interpreter at each of them, and the GPU would idle whenever the loop is busy.

Memory that crosses streams is kept alive, not marked with ``record_stream``. Torch's allocator
reuses a block in the order of the stream that allocated it, so a tensor that another stream still
reads must not be freed. Each stream holds the function, the value and the ``after`` of a launch
until its event has fired. ``record_stream`` would give up the block at once and let the allocator
find out by events of its own; it delays the reuse by an unknown time, does nothing for pinned or
foreign memory, and has to be remembered for each tensor, where keeping is one rule for all.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch.cuda

from aiosched.device.stream import DeviceClosed, InFlight, attempt, closed_before
from aiosched.device.waiter import EventWaiter

T = TypeVar("T")


class CudaInFlight(InFlight[T]):
    """Work on a CUDA stream. All of its state changes on the event loop."""

    __slots__ = ("_begin", "_end", "_stream", "_watched")

    def __init__(
        self, step: int, label: str, loop: asyncio.AbstractEventLoop, stream: CudaStream
    ) -> None:
        super().__init__(step, label, loop)
        self._stream = stream
        self._begin, self._end = stream.device._new_events()
        self._watched = False

    @property
    def value(self) -> T:
        """The result, whose tensors work may be launched with; the host must await it first."""
        if self._error is None:
            return self._value  # type: ignore[return-value]
        return super().value

    def done(self) -> bool:
        if not self._done:
            self._stream.sweep()
        return self._done

    def _arm(self) -> None:
        if not self._watched:
            self._watched = True
            self._stream.device._watch(self)


class _Launch(NamedTuple):
    """What must live until the event of ``flight`` has fired."""

    flight: CudaInFlight[Any]
    fn: Callable[[], Any]
    after: tuple[InFlight[Any], ...]
    value: Any  # apart from the flight, which may be given up


class CudaStream:
    """One CUDA stream and the launches on it whose events have not fired, in their order."""

    def __init__(self, device: CudaDevice, name: str) -> None:
        self.name = name
        self.device = device
        self._cuda: Any = None  # torch.cuda.Stream, while the device is open
        self._fresh = True
        self._launches: deque[_Launch] = deque()

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
        """Run ``fn`` now, with this stream current and behind the events of ``after``."""
        loop = self.device._open_loop()
        self.sweep()
        flight: CudaInFlight[T] = CudaInFlight(step, label, loop, self)
        try:
            error = self._enqueue(flight, fn, after)
        except Exception as refused:  # by CUDA itself: nothing can be launched any more
            error = refused
        # Work that failed half-way may have left kernels behind, so it is kept like any other.
        self._launches.append(_Launch(flight, fn, tuple(after), flight._value))
        if error is not None:
            flight._finish(None, error)
        return flight

    def _enqueue(
        self, flight: CudaInFlight[T], fn: Callable[[], T], after: Sequence[InFlight[Any]]
    ) -> BaseException | None:
        api, cuda = self.device._api, self._cuda
        if self._fresh:
            # Weights and pools were made on the caller's stream, which orders nothing with this.
            self._fresh = False
            cuda.wait_stream(api.current_stream(self.device.index))
        with api.stream(cuda):
            for earlier in after:
                if (
                    isinstance(earlier, CudaInFlight)
                    and earlier._stream is not self
                    and not earlier._done
                ):
                    cuda.wait_event(earlier._end)
            flight._begin.record(cuda)
            flight._value, error = attempt(fn, after)
            flight._end.record(cuda)
        return error

    def sweep(self) -> None:
        """Finish and let go of the launches whose events have fired."""
        while self._launches and self._has_fired(self._launches[0].flight):
            self._launches.popleft()

    def _has_fired(self, flight: CudaInFlight[Any]) -> bool:
        error: Exception | None = None
        try:
            if not flight._end.query():
                return False
            if not flight._done:
                self.device._stamp(flight)
        except Exception as raised:  # what a kernel did wrong shows at some later call
            error = raised
        self.device._finish(flight, error)
        return True


class CudaDevice:
    """One GPU: three streams, and a thread that turns their events into wake-ups.

    The streams do not wait for torch's default stream, apart from what was enqueued there before
    their first launch.

    Args:
        index: of the GPU.
        spin: wait actively. Saves some ten microseconds per step and takes one core.
        api: ``torch.cuda``, or what stands in for it in tests.
    """

    kind = "cuda"

    def __init__(self, index: int = 0, spin: bool = False, api: Any = torch.cuda) -> None:
        self.index = index
        self.torch_device = f"cuda:{index}"
        self.schedule = CudaStream(self, "schedule")
        self.forward = CudaStream(self, "forward")
        self.copy = CudaStream(self, "copy")
        self._streams = (self.schedule, self.forward, self.copy)
        self._spin = spin
        self._api = api
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiter: EventWaiter[CudaInFlight[Any]] | None = None
        self._anchor: tuple[Any, float] | None = None  # an event, and when it fired

    def open(self, loop: asyncio.AbstractEventLoop) -> None:
        """Make the streams and start the waiting thread."""
        if self._loop is not None:
            raise RuntimeError("the CUDA device is open already")
        for stream in self._streams:
            stream._cuda = self._api.Stream(device=self.index)
            stream._fresh = True
        _, event = self._new_events()
        event.record(self.forward._cuda)
        event.synchronize()
        self._anchor = (event, time.perf_counter())
        # A thread begins on GPU 0, where its first call would make a context for nothing.
        self._waiter = EventWaiter(loop, self._fired, lambda: self._api.set_device(self.index))
        self._waiter.start()
        self._loop = loop

    def close(self, timeout: float) -> None:
        """Wait for the GPU to finish what was launched, at most ``timeout`` seconds.

        What has not finished by then fails with ``DeviceClosed``. Its memory is left to the thread
        that still waits for it.
        """
        if self._loop is None or self._waiter is None:
            return
        for stream in self._streams:
            if stream._launches:
                self._watch(stream._launches[-1].flight)
        self._loop = None
        self._waiter.close(timeout)
        for stream in self._streams:
            stream.sweep()
            for launch in stream._launches:
                self._finish(launch.flight, closed_before(launch.flight))
        self._waiter = None

    def now(self) -> float:
        return time.perf_counter()

    def host_access(self, *, reads: Sequence[object] = (), writes: Sequence[object] = ()) -> None:
        """Nothing to check here: ``SimDevice`` does."""

    def _open_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            raise DeviceClosed("the CUDA device is not open")
        return self._loop

    def _new_events(self) -> tuple[Any, Any]:
        """Events for the begin and the end of a launch."""
        event = self._api.Event
        return event(enable_timing=True), event(enable_timing=True, blocking=not self._spin)

    def _watch(self, flight: CudaInFlight[Any]) -> None:
        if self._waiter is not None:
            self._waiter.watch(flight, flight._end)

    def _fired(self, flight: CudaInFlight[Any], error: Exception | None) -> None:
        """On the loop: the waiting thread saw the event of ``flight``."""
        for stream in self._streams:
            stream.sweep()
        if error is not None:
            self._finish(flight, error)

    def _finish(self, flight: CudaInFlight[Any], error: Exception | None) -> None:
        value = flight._value if error is None else None
        if flight._finish(value, error):
            flight._wake()

    def _stamp(self, flight: CudaInFlight[Any]) -> None:
        """Place the events of ``flight`` on the host's clock.

        CUDA only measures from event to event, in milliseconds as a float32. So the anchor moves
        along: the distances stay short and their rounding stays below a microsecond.
        """
        assert self._anchor is not None
        event, fired = self._anchor
        flight.finished = fired + event.elapsed_time(flight._end) / 1e3
        flight.started = flight.finished - flight._begin.elapsed_time(flight._end) / 1e3
        if flight.finished > fired:
            self._anchor = (flight._end, flight.finished)
