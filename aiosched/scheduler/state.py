"""SchedulerState: every request that the engine knows, and the moves between its states.

        push             admit             last chunk        last step launched
    ───────► QUEUED ───────────► PREFILL ───────► DECODE ───────────► RETIRING
               ▲                    │             │   ▲                   │
               ├──────── retract ───┴─────────────┤   │ a place is free   │
               ├──────── retract ─────────────────│─ RESUMING             │
               │ reader reads          slow reader▼   ▲ reader reads      │
               PARKED ◄──────── retract ───────── PAUSED                  ▼
                                                          finish ───► FINISHED

``finish`` may come from any state. All moves are plain calls on the event loop: none waits, so a
cleanup can not be cancelled half-way.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import Counter
from collections.abc import Sequence

import numpy as np

from aiosched.errors import KVCacheExhausted
from aiosched.request import FinishReason
from aiosched.scheduler.cohort import Cohort
from aiosched.scheduler.memory import KVMemory
from aiosched.scheduler.queue import WaitingQueue
from aiosched.scheduler.requests import Family, Request, State
from aiosched.scheduler.rows import RowTable

MOST_GROWTH = 1024
"""Tokens by which an answer is expected to grow at most, when room is kept for it: few get as long
as they may, and one without ``max_tokens`` would keep everybody else out."""

HOLDS_ROW = frozenset({State.PREFILL, State.DECODE, State.RETIRING, State.PAUSED, State.RESUMING})


class RunningSet:
    """The requests that decode, in the order in which they began."""

    def __init__(self, table: RowTable) -> None:
        self.cohort = Cohort.of((), table)
        self._table = table
        self._added: list[Request] = []
        self._stale = False
        self._turn = 0

    def add(self, request: Request) -> None:
        """A request is about to decode, for the first time or again; its state is set after."""
        if self._stale:  # it may still be listed from before it was paused or retracted
            self.refresh()
        self._added.append(request)

    def left(self) -> None:
        """Some request does not decode any more (its state says so)."""
        self._stale = True

    def refresh(self) -> None:
        """Bring ``cohort`` up to date; free if nobody came or left."""
        if self._stale or self._added:
            everybody = [*self.cohort.requests, *self._added]
            going = [r for r in everybody if r.state is State.DECODE]
            self.cohort = Cohort.of(going, self._table)
            self._added.clear()
            self._stale = False

    @property
    def requests(self) -> tuple[Request, ...]:
        """As of the last ``refresh``."""
        return self.cohort.requests

    def __len__(self) -> int:
        self.refresh()
        return len(self.cohort)

    def turn(self, most: int) -> Cohort:
        """Who decodes in this step if only ``most`` may: everybody in turn."""
        count = len(self)
        if count <= most:
            return self.cohort
        places = [(self._turn + i) % count for i in range(most)]
        self._turn = (self._turn + most) % count
        requests = self.cohort.requests
        return Cohort.of([requests[place] for place in places], self._table)


class SchedulerState:
    """Who is where. ``plan`` and ``process_batch_result`` read and move it; nobody else does.

    Attributes:
        step: number of the last step that was planned.
        completed: number of the last step whose result was processed.
        new_token_ratio: see ``headroom``.
    """

    def __init__(self, table: RowTable, memory: KVMemory) -> None:
        self.table = table
        self.memory = memory
        self.waiting = WaitingQueue()
        self.prefilling: list[Request] = []
        self._prefill_growth = 0  # tokens that those may generate: counted, not summed each time
        self.running = RunningSet(table)
        self.paused: set[Request] = set()
        self.resuming: set[Request] = set()
        self.parked: set[Request] = set()
        self.retiring: set[Request] = set()
        self.live: set[Request] = set()
        self.on_empty: list[asyncio.Future[None]] = []  # whoever waits until nobody is left
        self.step = 0
        self.completed = 0
        self.retractions = 0
        self.finished: Counter[FinishReason] = Counter()
        self.new_token_ratio = 0.5
        self._deadlines: list[tuple[float, int, Request]] = []

    @property
    def active(self) -> int:
        """Requests that take part in batches: what ``max_running_requests`` bounds."""
        return len(self.prefilling) + len(self.running)

    def push(self, request: Request) -> None:
        """A new request."""
        self.live.add(request)
        self.waiting.push(request)
        if request.deadline_at is not None:
            heapq.heappush(self._deadlines, (request.deadline_at, request.key[1], request))

    def release_family(self, family: Family) -> None:
        """Its prompt is read in, or its leader has ended: siblings wait for it no longer."""
        siblings, family.set_aside = family.set_aside, []
        for sibling in siblings:
            self.waiting.put_back(sibling)

    def begin_prefill(self, request: Request) -> None:
        """It was admitted: it has a row, and pages for all its tokens."""
        request.state = State.PREFILL
        self.prefilling.append(request)
        self._prefill_growth += min(request.max_new, MOST_GROWTH)

    def begin_decode(self, request: Request) -> None:
        """Its last chunk is launched."""
        self._leave_prefill(request)
        self.running.add(request)
        request.state = State.DECODE

    def retire(self, request: Request) -> None:
        """Its last step is launched: it takes no place in a batch any more."""
        if request.state is State.PREFILL:
            self._leave_prefill(request)
        else:
            self.running.left()
        request.state = State.RETIRING
        self.retiring.add(request)

    def pause(self, request: Request) -> None:
        """Its reader is slow: leave it out of batches. Its KV stays."""
        if request.state is State.DECODE:
            self.running.left()
        elif request.state is State.RESUMING:  # tokens that were in flight came meanwhile
            self.resuming.remove(request)
        else:
            return
        request.state = State.PAUSED
        self.paused.add(request)

    def resume(self, request: Request) -> None:
        """Its reader reads again: it waits for a place, before everybody who is not admitted."""
        if request.state is State.PAUSED:
            self.paused.remove(request)
            self.resuming.add(request)
            request.state = State.RESUMING
        elif request.state is State.PARKED:
            self.parked.remove(request)
            self.waiting.push(request)
        elif request.row:  # it is not held up, but how much it may hold unread may have changed
            self.table.look_at[request.row] = 0

    def fill_places(self, places: int) -> None:
        """Let those decode whose readers read again, the first in the queue's order first.

        ``places``: the most that may take part in batches. While any wait nobody is admitted, so
        they wait no longer than it takes a running request to end or pause.
        """
        while self.resuming and self.active < places:
            request = min(self.resuming, key=lambda r: r.key)
            self.resuming.remove(request)
            self.running.add(request)
            request.state = State.DECODE

    def retract(self, request: Request) -> None:
        """Take row and pages away; it is read in again later. What is in flight for it is lost.

        The results that are pending carry the generation of the row that it gives up, so they
        apply to nobody; greedy or seeded, it will generate the same tokens again.
        """
        paused = request.state is State.PAUSED
        self._leave(request)
        self.memory.release(request)
        request.tracked_row = 0
        request.retractions += 1
        self.retractions += 1
        self.new_token_ratio = 1.0
        if paused:
            request.state = State.PARKED
            self.parked.add(request)
        else:
            self.waiting.push(request)

    def finish(
        self, request: Request, reason: FinishReason, error: Exception | None = None
    ) -> None:
        """The one end of a request, from any state. A second one does nothing.

        Row and pages are given back first; then its reader is told.
        """
        if request.finish_reason is not None:
            return
        if request is request.family.leader:
            self.release_family(request.family)
        held = request.state in HOLDS_ROW
        self._leave(request)
        request.state = State.FINISHED
        request.finish_reason = reason
        request.error = error
        if held:
            self.memory.release(request, keep=error is None)
        self.finished[reason] += 1
        self.live.discard(request)
        if request.deadline_at is not None:
            self._forget_deadlines()
        request.reader.notify()
        if not self.live:
            waiting, self.on_empty = self.on_empty, []
            for future in waiting:
                if not future.done():
                    future.set_result(None)

    def exhaust(self, request: Request) -> None:
        """Alone in the engine it still needs more KV memory than there is: its own error."""
        capacity = self.memory.pool.total * self.memory.page_size
        error = KVCacheExhausted(request.id, request.length, capacity)
        self.finish(request, FinishReason.ERROR, error)

    def expired(self, now: float) -> list[Request]:
        """Requests whose deadline has passed; each is named once."""
        late = []
        while self._deadlines and self._deadlines[0][0] <= now:
            request = heapq.heappop(self._deadlines)[2]
            if not request.finished:
                late.append(request)
        return late

    @property
    def next_deadline(self) -> float | None:
        """When the next deadline passes, on the event loop's clock."""
        self._forget_deadlines()
        return self._deadlines[0][0] if self._deadlines else None

    def running_growth(self) -> int:
        """Tokens by which the requests that decode may still grow, as far as room is kept for."""
        self.running.refresh()
        rows = self.running.cohort.rows
        left = self.table.kv_limit[rows] - self.table.kv_len[rows]
        return int(np.minimum(left, MOST_GROWTH).sum())

    def headroom(self, running_growth: int) -> int:
        """Pages to keep for the growth of running requests when another is to be admitted.

        Nobody knows how long answers get. A share of what is still allowed is kept: half of it at
        first, all of it after a retraction has shown that this was too little, and less from step
        to step while it proves enough (after SGLang's ``new_token_ratio``).

        ``running_growth`` is asked once for all admissions of a turn: they do not change it.
        """
        growth = running_growth + self._prefill_growth
        return self.memory.pages_for(int(self.new_token_ratio * growth))

    def decay(self) -> None:
        """One step went by."""
        self.new_token_ratio = max(0.1, self.new_token_ratio * 0.998)

    def victims(self) -> Sequence[Request]:
        """Whom to retract, best first: those that do not run (paused, then resuming ones), then
        low priority, then late arrival.

        The last of the list is the one that must be let through for anything to progress.
        """
        self.running.refresh()
        idle = {State.PAUSED: 0, State.RESUMING: 1}
        holders = [*self.paused, *self.resuming, *self.prefilling, *self.running.requests]
        holders.sort(key=lambda r: (idle.get(r.state, 2), r.priority, -r.key[1]))
        return holders

    def _leave_prefill(self, request: Request) -> None:
        self.prefilling.remove(request)
        self._prefill_growth -= min(request.max_new, MOST_GROWTH)

    def _leave(self, request: Request) -> None:
        """Take it off the list that its state names."""
        match request.state:
            case State.QUEUED:
                self.waiting.remove(request)
            case State.PREFILL:
                self._leave_prefill(request)
            case State.DECODE:
                request.state = State.FINISHED  # whatever comes next, it decodes no more
                self.running.left()
            case State.PAUSED:
                self.paused.remove(request)
            case State.RESUMING:
                self.resuming.remove(request)
            case State.PARKED:
                self.parked.remove(request)
            case State.RETIRING:
                self.retiring.remove(request)
            case State.FINISHED:
                pass

    def _forget_deadlines(self) -> None:
        deadlines = self._deadlines
        while deadlines and deadlines[0][2].finished:
            heapq.heappop(deadlines)
        if len(deadlines) > 2 * len(self.live):  # the majority is behind somebody who lives long
            self._deadlines = [entry for entry in deadlines if not entry[2].finished]
            heapq.heapify(self._deadlines)
