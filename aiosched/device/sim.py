"""A device made of a cost model: streams that take time, and gates that a test opens.

Every stream is a FIFO. Work starts when the work before it and all of its ``after`` are done, takes
its cost, waits at its end while a gate holds it, and only then runs ``fn``: the bytes of a copy
land when its gate opens, not before.

Device time is nominal. Work that was launched in good time starts at the exact end of the work
before it, however late a thread or the event loop was told, so lateness does not add up.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar

from aiosched.device.happens_before import Access, HappensBefore, RaceError
from aiosched.device.sim_gates import Gates
from aiosched.device.sim_stream import Cost, SimInFlight, SimStream, Work
from aiosched.device.sim_time import LoopTime, RealTime, TimeKeeper
from aiosched.device.stream import DeviceClosed, InFlight, attempt, closed_before

T = TypeVar("T")


class TraceRecord(NamedTuple):
    """What happened to one piece of work, in seconds on the device's clock."""

    kind: Literal["launch", "start", "finish"]
    time: float
    stream: str
    step: int
    label: str


class SimDevice:
    """A device for tests and for measuring host time, without a model's arithmetic.

    Args:
        forward_time, copy_time, stage_time: seconds that work takes on the forward, copy and
            schedule stream: a number, or a function of (step, label).
        realtime: keep time in a thread of its own, to some 50 microseconds, and run ``fn`` there.
            Otherwise time is the event loop's, real or virtual, and ``fn`` runs on the loop.
        gated: hold all work at its end until it is released.
        check: prove that declared accesses are ordered.
        keep_trace: record ``trace``; switch it off for long runs.

    Attributes:
        trace: what happened, in order.
    """

    kind = "sim"
    torch_device = "cpu"

    def __init__(
        self,
        forward_time: Cost = 0.0,
        copy_time: Cost = 0.0,
        stage_time: Cost = 0.0,
        realtime: bool = False,
        gated: bool = False,
        check: bool = True,
        keep_trace: bool = True,
    ) -> None:
        self.schedule = SimStream(self, "schedule", stage_time)
        self.forward = SimStream(self, "forward", forward_time)
        self.copy = SimStream(self, "copy", copy_time)
        self._streams = (self.schedule, self.forward, self.copy)
        self._realtime = realtime
        self._keep_trace = keep_trace
        self.trace: list[TraceRecord] = []
        self._checker = HappensBefore() if check else None
        self._gates: Gates[asyncio.Future[None]] = Gates(shut=gated)
        self._unfinished: dict[SimInFlight[Any], None] = {}
        self._failing: dict[tuple[int, str], BaseException] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._time: TimeKeeper | None = None
        self._executing: SimInFlight[Any] | None = None
        self._executing_thread: int | None = None

    # The device's own interface -----------------------------------------------------------------

    def open(self, loop: asyncio.AbstractEventLoop) -> None:
        """Bind to ``loop``; in real time, start the thread."""
        if self._time is not None:
            raise RuntimeError("the simulated device is open already")
        for stream in self._streams:
            stream._free_at = 0.0
        self._loop = loop
        self._time = RealTime(loop) if self._realtime else LoopTime(loop)
        self._time.start()

    def close(self, timeout: float) -> None:
        """Fail all unfinished work with ``DeviceClosed``; join the thread, if there is one."""
        if self._time is None:
            return
        self._time.stop(timeout)
        self._time = None
        for stream in self._streams:
            stream._queue.clear()
        for flight in list(self._unfinished):
            if flight._finish(None, closed_before(flight)):
                flight._wake()
        self._unfinished.clear()
        for watcher in self._gates.forget_watchers():
            watcher.cancel()

    def now(self) -> float:
        return self._keeper().now()

    @property
    def races(self) -> Sequence[RaceError]:
        """The unordered accesses found so far; each was raised, too."""
        return () if self._checker is None else self._checker.races

    def host_access(self, *, reads: Sequence[object] = (), writes: Sequence[object] = ()) -> None:
        """Raises ``RaceError`` if work in flight may still touch what the host touches now."""
        if self._checker is not None:
            self._checker.host(reads, writes)

    # For tests ----------------------------------------------------------------------------------

    def hold(self, step: int | None = None, label: str | None = None) -> None:
        """Shut the gate of matching work, now in flight or launched later. ``None`` matches all."""
        self._run(lambda: self._gates.rule(step, label, shut=True))

    def release(self, step: int | None = None, label: str | None = None) -> None:
        """Open the gate of matching work: what stands there finishes, what comes passes through.

        The last ``hold`` or ``release`` that matches a piece of work decides.
        """

        def open_gates() -> None:
            self._gates.rule(step, label, shut=False)
            for stream in self._streams:
                self._pass_gate(stream, late=True)

        self._run(open_gates)

    async def reached(self, step: int, label: str = "forward") -> None:
        """Return once that work stands at its gate (or has passed it): all before it is done."""
        watcher = asyncio.get_running_loop().create_future()

        def watch() -> None:
            if not self._gates.watch(step, label, watcher):
                self._notify([watcher])

        self._run(watch)
        await watcher

    def failing(
        self, step: int, label: str = "forward", error: BaseException | None = None
    ) -> None:
        """Make that work raise ``error`` instead of running; a ``RuntimeError`` by default."""
        error = error or RuntimeError(f"step {step} {label!r} was told to fail")
        self._run(lambda: self._failing.__setitem__((step, label), error))

    # The course of one piece of work: launch, start, end, gate, finish ----------------------------

    def _launch(
        self,
        stream: SimStream,
        fn: Callable[[], T],
        step: int,
        label: str,
        after: Sequence[InFlight[Any]],
        reads: Sequence[object],
        writes: Sequence[object],
    ) -> InFlight[T]:
        keeper = self._keeper()
        assert self._loop is not None
        flight: SimInFlight[T] = SimInFlight(step, label, self._loop, self, stream.name)
        if self._checker is not None:
            clocks = [c for e in after if (c := getattr(e, "_clock", None)) is not None]
            name = f"step {step} {label!r}"
            flight._clock = self._checker.launched(stream.name, name, clocks, reads, writes)
        work = Work(flight, fn, tuple(after), keeper.now(), stream.cost(step, label))
        self._unfinished[flight] = None
        keeper.run(lambda: self._enqueue(stream, work))
        return flight

    def _enqueue(self, stream: SimStream, work: Work) -> None:
        stream._queue.append(work)
        self._record("launch", work.launched, stream, work.flight)
        self._start(stream)

    def _start(self, stream: SimStream) -> None:
        """Start the head of a stream if nothing stands in its way."""
        if self._time is None or not stream._queue:
            return
        work = stream._queue[0]
        if work.running or not all(earlier._done for earlier in work.after):
            return
        flight = work.flight
        work.running = True
        flight.started = max(work.launched, stream._free_at, *(e.finished for e in work.after))
        work.end = flight.started + work.cost
        self._record("start", flight.started, stream, flight)
        self._time.at(work.end, lambda: self._reach_end(stream, work))

    def _reach_end(self, stream: SimStream, work: Work) -> None:
        work.at_gate = True
        self._notify(self._gates.arrive(work.flight.step, work.flight.label))
        self._pass_gate(stream)

    def _pass_gate(self, stream: SimStream, late: bool = False) -> None:
        """Finish the head of a stream if it stands at an open gate; ``late``: it stood there."""
        if not stream._queue or not (work := stream._queue[0]).at_gate:
            return
        flight = work.flight
        if self._gates.shut(flight.step, flight.label):
            return
        stream._queue.popleft()
        flight.finished = max(work.end, self.now()) if late else work.end
        stream._free_at = flight.finished
        self._record("finish", flight.finished, stream, flight)
        self._finish(work)
        for other in self._streams:
            self._start(other)

    def _finish(self, work: Work) -> None:
        flight = work.flight
        self._executing, self._executing_thread = flight, threading.get_ident()
        try:
            if (told := self._failing.get((flight.step, flight.label))) is not None:
                work.fn = partial(_fail, told)
            value, error = attempt(work.fn, work.after)
        finally:
            self._executing = self._executing_thread = None
        self._unfinished.pop(flight, None)
        if flight._finish(value, error):
            self._keeper().tell_loop(flight._wake)

    # Small things -------------------------------------------------------------------------------

    def _keeper(self) -> TimeKeeper:
        if self._time is None:
            raise DeviceClosed("the simulated device is not open")
        return self._time

    def _run(self, change: Callable[[], None]) -> None:
        """Change the state of the device, which may not be open yet."""
        if self._time is None:
            change()
        else:
            self._time.run(change)

    def _notify(self, watchers: list[asyncio.Future[None]]) -> None:
        def tell() -> None:
            for watcher in watchers:
                if not watcher.done():
                    watcher.set_result(None)

        if watchers:
            self._keeper().tell_loop(tell)

    def _record(
        self,
        kind: Literal["launch", "start", "finish"],
        time: float,
        stream: SimStream,
        flight: InFlight[Any],
    ) -> None:
        if self._keep_trace:
            self.trace.append(TraceRecord(kind, time, stream.name, flight.step, flight.label))

    def _seen(self, flight: SimInFlight[Any]) -> None:
        """Somebody looks at finished work: the host, or the ``fn`` that runs at the moment."""
        if self._checker is None or flight._clock is None:
            return
        if threading.get_ident() != self._executing_thread:
            self._checker.observed(flight._clock)
        elif (reader := self._executing) is not None and reader._clock is not None:
            write, read = _access("write", flight), _access("read", reader)
            self._checker.read_result(write, read, reader._clock)


def _access(verb: str, flight: SimInFlight[Any]) -> Access:
    assert flight._clock is not None
    tick = flight._clock[flight._stream]
    return Access(flight._stream, tick, verb, f"step {flight.step} {flight.label!r}")


def _fail(error: BaseException) -> None:
    raise error
