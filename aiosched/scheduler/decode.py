"""DecodePlanner: which running requests decode in the next step, and the pages they need."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from aiosched.scheduler.cohort import Cohort
from aiosched.scheduler.state import SchedulerState


class DecodePlanner:
    """Picks the rows that decode; retracts requests when KV pages run out."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state

    def plan(self, most: int) -> Cohort:
        """At most ``most`` requests, each with a page for the token that it brings."""
        state, table = self._state, self._state.table
        cohort = state.running.turn(most)
        rows = cohort.rows
        short = self._short(rows)
        count = int(np.count_nonzero(short))
        if not count:
            return cohort
        if state.memory.make_room(count):
            state.memory.grow(rows[short])
            return cohort
        state.memory.grow(self._relieve(rows[short]))
        # Those that were retracted are gone; those that got no page sit this step out.
        going = table.current(rows, cohort.generations) & ~self._short(rows)
        return Cohort.of([cohort.requests[i] for i in np.flatnonzero(going)], table)

    def _short(self, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which rows have no page yet for their next token."""
        table = self._state.table
        return table.kv_len[rows] >= table.num_pages[rows] * self._state.memory.page_size

    def _relieve(self, needy: NDArray[np.int64]) -> NDArray[np.int64]:
        """Retract as few requests as it takes, and return the rows that can have a page now.

        Pages that are about to come back (behind a fence, or held by a request that retires)
        count as arriving: for those one waits a step or two, nobody is retracted for them.
        """
        state, table = self._state, self._state.table
        generations = table.generation[needy]
        victims = list(state.victims())
        while True:
            needy = needy[table.current(needy, generations)]
            generations = table.generation[needy]
            if len(needy) <= state.memory.available + self._retiring_pages() or not victims:
                break
            victim = victims.pop(0)
            if victims:
                state.retract(victim)
            else:
                self._only_one_left()
        state.memory.make_room(len(needy))
        owners = [(table.owner[row], row) for row in needy.tolist()]
        owners.sort(key=lambda pair: (-pair[0].priority, pair[0].key[1]) if pair[0] else (0, 0))
        return np.array([row for _, row in owners[: state.memory.pool.free]], dtype=np.int64)

    def _retiring_pages(self) -> int:
        table = self._state.table
        rows = np.array([r.row for r in self._state.retiring], dtype=np.int64)
        return int((table.num_pages[rows] - table.num_shared[rows]).sum())

    def _only_one_left(self) -> None:
        """Nobody else holds a page, and still there is none: the request can never go on.

        It first gets the tokens that are in flight for it.
        """
        state = self._state
        state.running.refresh()
        for request in state.running.requests:
            if state.table.last_step[request.row] <= state.completed and not state.retiring:
                state.exhaust(request)
