"""Device work as awaitables: the protocol that all devices share.

A ``Stream`` runs work in the order of its launches. ``launch`` returns at once with an
``InFlight``, which other work may be ordered behind (``after=``) and which a coroutine may await.
Nothing here knows of models, batches or requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Sequence
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar

T = TypeVar("T")


class DeviceClosed(RuntimeError):
    """The device is not open, or was closed before this work was done."""


class InFlight(Generic[T]):
    """Work that was launched on a stream: an awaitable for its result.

    Any number of tasks may await it, and cancelling one of them cancels neither the work nor the
    others. A device thread finishes it (``_finish``); the event loop is woken only if somebody
    waits by then, so a result that landed before it was wanted costs no wake-up.

    Attributes:
        step: number of the step that it belongs to.
        label: what it is, for errors and traces: ``stage``, ``forward``, ``copy`` …
        started, finished: seconds on the device's clock (``Device.now``), 0.0 until known.
    """

    __slots__ = (
        "_done",
        "_error",
        "_loop",
        "_traceback",
        "_value",
        "_waiters",
        "finished",
        "label",
        "started",
        "step",
    )

    def __init__(self, step: int, label: str, loop: asyncio.AbstractEventLoop) -> None:
        self.step = step
        self.label = label
        self.started = 0.0
        self.finished = 0.0
        self._loop = loop
        self._done = False
        self._value: T | None = None
        self._error: BaseException | None = None
        self._traceback: TracebackType | None = None
        self._waiters: list[asyncio.Future[None]] = []

    def __repr__(self) -> str:
        state = "pending" if not self._done else "failed" if self._error else "done"
        return f"<{type(self).__name__} step={self.step} {self.label} {state}>"

    @property
    def value(self) -> T:
        """The result, for work that is ordered behind this one. Raises what the work raised.

        Raises ``asyncio.InvalidStateError`` while the work runs. (On CUDA the tensors exist from
        the launch on, and work that is ordered behind this one may be launched with them.)
        """
        if not self._done:
            raise asyncio.InvalidStateError(f"step {self.step} {self.label!r} is not done yet")
        if self._error is not None:
            # Readers share the exception: without this each raise would lengthen its traceback.
            raise self._error.with_traceback(self._traceback)
        return self._value  # type: ignore[return-value]

    @property
    def device_seconds(self) -> float:
        """How long the device worked on it."""
        return self.finished - self.started

    def done(self) -> bool:
        """Whether the result has landed (or the work has failed)."""
        return self._done

    def __await__(self) -> Generator[asyncio.Future[None], None, T]:
        if not self.done():
            waiter = self._loop.create_future()
            # First register, then look again: the finishing thread does it the other way round, so
            # one of the two always sees the other.
            self._waiters.append(waiter)
            try:
                self._arm()
                if not self._done:
                    yield from waiter
            finally:
                if waiter in self._waiters:
                    self._waiters.remove(waiter)
        return self.value

    def _arm(self) -> None:
        """Called on the loop when somebody begins to wait (CUDA hands its event over here)."""

    def _finish(self, value: T | None, error: BaseException | None = None) -> bool:
        """Record the outcome, from any thread. True if the loop must now call ``_wake``.

        The first outcome stands: work that a closing device gave up may still come to its end.
        """
        if self._done:
            return False
        self._value = value
        self._error = error
        self._traceback = error.__traceback__ if error is not None else None
        self._done = True
        return bool(self._waiters)

    def _wake(self) -> None:
        """Release the waiters. On the event loop only."""
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)


def attempt(
    fn: Callable[[], T], after: Sequence[InFlight[Any]]
) -> tuple[T | None, BaseException | None]:
    """Run ``fn`` unless work in ``after`` failed. Returns its value, or what stopped it."""
    for earlier in after:
        if earlier._error is not None:
            return None, earlier._error
    try:
        return fn(), None
    except BaseException as error:
        # Without this frame: it refers to ``after``, which would live as long as the error does.
        here = error.__traceback__
        return None, error.with_traceback(here.tb_next if here is not None else None)


def closed_before(flight: InFlight[Any]) -> DeviceClosed:
    """The error of work that a closing device gave up."""
    return DeviceClosed(f"the device closed before step {flight.step} {flight.label!r} was done")


class Stream(Protocol):
    """A queue of device work with the order of its launches."""

    @property
    def name(self) -> str:
        """``schedule``, ``forward`` or ``copy``."""

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
        """Enqueue ``fn`` behind this stream's earlier work and behind ``after``.

        If work in ``after`` failed, this fails with the same error and ``fn`` does not run. What
        ``fn`` raises is raised where the ``InFlight`` is awaited, never here.
        ``reads`` and ``writes`` name the shared buffers that ``fn`` touches (anything with an
        identity); a checking device proves that conflicting accesses are ordered, others ignore
        them. Called on the device's event loop. Raises ``DeviceClosed``.
        """


class Device(Protocol):
    """Three streams and a clock. Bound to one event loop between ``open`` and ``close``."""

    @property
    def kind(self) -> str:
        """``cpu``, ``cuda`` or ``sim``."""

    @property
    def torch_device(self) -> str:
        """Where tensors live: ``cpu``, ``cuda:0``."""

    @property
    def schedule(self) -> Stream:
        """Host-to-device copies."""

    @property
    def forward(self) -> Stream:
        """The model and the sampler."""

    @property
    def copy(self) -> Stream:
        """Device-to-host copies."""

    def open(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start threads, make streams. Called on the loop that owns the engine."""

    def close(self, timeout: float) -> None:
        """Stop and join every thread within ``timeout`` seconds. Idempotent; called on the loop."""

    def now(self) -> float:
        """Seconds on the clock of ``InFlight.started`` and ``finished``."""

    def host_access(self, *, reads: Sequence[object] = (), writes: Sequence[object] = ()) -> None:
        """The host touches shared buffers now; a checking device verifies that it may."""
