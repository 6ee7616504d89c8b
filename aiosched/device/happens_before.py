"""Proves that conflicting accesses to shared buffers are ordered, whatever the timing.

The host and each stream are actors with a vector clock (Lamport 1978, Fidge 1988). Work happens
after all that the host did before its launch, after the earlier work of its stream, and after its
``after``. The host happens after work once it has seen it finished: by awaiting it, by reading its
value, or by ``done()`` being true. Two accesses conflict if they touch the same buffer and one of
them writes. A conflicting pair with no such path between them is a race, even if this run happened
to execute it in the right order.

Every edge into work is known when it is launched, so each access is judged right there.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

HOST = "host"

Clock: TypeAlias = dict[str, int]


class RaceError(AssertionError):
    """Two accesses to one buffer conflict and nothing orders them.

    Attributes:
        earlier, later: the accesses, in the order in which the host declared them.
    """

    def __init__(self, buffer: str, earlier: Access, later: Access) -> None:
        super().__init__(f"nothing orders {later} behind {earlier} of {buffer}")
        self.earlier = earlier
        self.later = later


@dataclass(frozen=True, slots=True)
class Access:
    """One read or write: who did it, and which tick of that actor's clock it was."""

    actor: str
    tick: int
    verb: str  # "read", "write"
    name: str  # "the host", "step 3 'forward'"

    def __str__(self) -> str:
        where = "" if self.actor == HOST else f" on stream {self.actor!r}"
        return f"the {self.verb} by {self.name}{where}"

    def before(self, clock: Clock) -> bool:
        return clock.get(self.actor, 0) >= self.tick


@dataclass(slots=True)
class _History:
    """The accesses to one buffer that a later one could still race with."""

    write: Access | None = None
    reads: dict[str, Access] = field(default_factory=dict)  # the last one of each actor
    alive: weakref.ref[object] | None = None


class HappensBefore:
    """The clocks of one device and the accesses that were declared to it.

    Arrays, tensors and other objects are told apart by identity and are not kept alive: declare
    the owner, not a view of it. A string or tuple stands for itself, so that a buffer may be named.

    Attributes:
        races: every ``RaceError`` that was raised, for the end of a test.
    """

    def __init__(self) -> None:
        self.races: list[RaceError] = []
        # It never ticks: whatever the host did is before whatever it launches later.
        self._host: Clock = {HOST: 1}
        self._streams: dict[str, Clock] = {}
        self._buffers: dict[object, _History] = {}

    def launched(
        self,
        stream: str,
        name: str,
        after: Sequence[Clock],
        reads: Sequence[object],
        writes: Sequence[object],
    ) -> Clock:
        """Work was launched; returns its clock. Raises ``RaceError``."""
        clock = dict(self._host)
        for earlier in (self._streams.get(stream, {}), *after):
            _join(clock, earlier)
        clock[stream] = clock.get(stream, 0) + 1
        self._streams[stream] = clock
        self._touch(stream, name, clock, reads, writes)
        return clock

    def host(self, reads: Sequence[object], writes: Sequence[object]) -> None:
        """The host touches buffers now. Raises ``RaceError``."""
        self._touch(HOST, "the host", self._host, reads, writes)

    def observed(self, clock: Clock) -> None:
        """The host saw that the work of this clock has finished."""
        _join(self._host, clock)

    def read_result(self, writer: Access, reader: Access, clock: Clock) -> None:
        """Work with this ``clock`` reads the result of ``writer``. Raises ``RaceError``."""
        if not writer.before(clock):
            raise self._race("its result", writer, reader)

    def _touch(
        self,
        actor: str,
        name: str,
        clock: Clock,
        reads: Sequence[object],
        writes: Sequence[object],
    ) -> None:
        for verb, buffers in (("read", reads), ("write", writes)):
            access = Access(actor, clock[actor], verb, name)
            for buffer in buffers:
                history = self._history(buffer)
                rivals = [history.write] if history.write is not None else []
                if verb == "write":
                    rivals += history.reads.values()
                for rival in rivals:
                    if not rival.before(clock):
                        raise self._race(_shown(buffer), rival, access)
                if verb == "write":
                    history.write = access
                    history.reads.clear()
                else:
                    history.reads[actor] = access

    def _race(self, buffer: str, earlier: Access, later: Access) -> RaceError:
        self.races.append(RaceError(buffer, earlier, later))
        return self.races[-1]

    def _history(self, buffer: object) -> _History:
        try:
            alive = weakref.ref(buffer, lambda _: self._buffers.pop(key, None))
        except TypeError:
            return self._buffers.setdefault(buffer, _History())
        key = ("id", id(buffer))
        return self._buffers.setdefault(key, _History(alive=alive))


def _join(clock: Clock, other: Clock) -> None:
    for actor, tick in other.items():
        if clock.get(actor, 0) < tick:
            clock[actor] = tick


def _shown(buffer: object) -> str:
    if isinstance(buffer, (str, bytes, int, tuple)):
        return f"buffer {buffer!r}"
    return f"a buffer of type {type(buffer).__name__} at {id(buffer):#x}"
