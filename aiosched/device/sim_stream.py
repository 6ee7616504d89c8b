"""What a simulated device is made of: streams, the work on them, and its awaitables."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from aiosched.device.happens_before import Clock
from aiosched.device.stream import InFlight

if TYPE_CHECKING:
    from aiosched.device.sim import SimDevice

T = TypeVar("T")

Cost: TypeAlias = float | Callable[[int, str], float]


class SimInFlight(InFlight[T]):
    """Work on a simulated stream. The host's looking at it orders the host behind it."""

    __slots__ = ("_clock", "_device", "_stream")

    def __init__(
        self, step: int, label: str, loop: asyncio.AbstractEventLoop, device: SimDevice, stream: str
    ) -> None:
        super().__init__(step, label, loop)
        self._device = device
        self._stream = stream
        self._clock: Clock | None = None  # None: nothing is checked

    @property
    def value(self) -> T:
        if self._done:
            self._device._seen(self)
        return super().value

    def done(self) -> bool:
        if self._done:
            self._device._seen(self)
        return self._done


@dataclass(eq=False, slots=True)
class Work:
    """A launch on its way through its stream."""

    flight: SimInFlight[Any]
    fn: Callable[[], Any]
    after: Sequence[InFlight[Any]]
    launched: float
    cost: float  # seconds
    running: bool = False
    end: float = 0.0  # nominal
    at_gate: bool = False


class SimStream:
    """A FIFO of simulated work."""

    def __init__(self, device: SimDevice, name: str, cost: Cost) -> None:
        self.name = name
        self._device = device
        self._cost = cost
        self._queue: deque[Work] = deque()
        self._free_at = 0.0  # nominal end of the last work that finished

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
        """Enqueue ``fn``. Raises ``RaceError`` if an access that it declares is not ordered."""
        return self._device._launch(self, fn, step, label, after, reads, writes)

    def cost(self, step: int, label: str) -> float:
        """Seconds that this work takes."""
        return self._cost(step, label) if callable(self._cost) else self._cost
