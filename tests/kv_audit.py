"""Bookkeeping and liveness, checked in every turn of a running engine's scheduler."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from aiosched import Engine
from aiosched.cache.pages import PageIds
from aiosched.cache.radix import Node, RadixCache
from aiosched.scheduler.batch import ScheduleBatch
from aiosched.scheduler.requests import Request, State
from aiosched.scheduler.scheduler import Limits
from aiosched.scheduler.state import HOLDS_ROW, SchedulerState


def state_of(engine: Engine) -> SchedulerState:
    assert engine._runtime is not None
    return engine._runtime._state


def limits_of(engine: Engine) -> Limits:
    assert engine._runtime is not None
    return engine._runtime.limits


def audit(state: SchedulerState) -> None:
    """Every page has exactly one owner, every row at most one, every request one place."""
    _audit_pages(state)
    _audit_rows(state)
    _audit_places(state)


def _audit_pages(state: SchedulerState) -> None:
    memory, table = state.memory, state.table
    pool, radix = memory.pool, memory.radix
    pool.audit()
    assert pool.free + pool.arriving + pool.held == pool.total
    owned = [pages for batch in pool._waiting.values() for pages in batch]
    owned.append(pool._stack[: pool.free])
    cached = 0
    if radix is not None:
        for node in _nodes(radix):
            owned.append(node.pages)
            cached += len(node.pages)
    for request in holders(state):
        row = request.row
        shared, total = int(table.num_shared[row]), int(table.num_pages[row])
        owned.append(table.page_table[row, shared:total])
        assert table.kv_done[row] <= table.kv_len[row] <= total * memory.page_size
        assert shared * memory.page_size <= table.kv_done[row]
        assert table.page_table[row, :shared].tolist() == _path(request.node)
    names = np.concatenate(owned)
    assert np.array_equal(np.sort(names), np.arange(1, pool.total + 1)), "a page is lost or shared"
    if radix is not None:
        assert cached == radix.pages_total
        locked = {page for request in holders(state) for page in _path(request.node)}
        assert radix.pages_evictable == cached - len(locked)


def _audit_rows(state: SchedulerState) -> None:
    table = state.table
    assert table.owner[0] is None
    owned = {r.row: r for r in holders(state)}
    assert 0 not in owned
    assert {row: owner for row, owner in enumerate(table.owner) if owner is not None} == owned
    assert table.free + table.arriving + len(owned) == table.count
    for row, request in owned.items():
        assert table.out_len[row] == len(request.output) <= request.max_new
        assert table.look_at[row] <= request.next_look()


def _audit_places(state: SchedulerState) -> None:
    state.running.refresh()
    places = {
        State.QUEUED: list(state.waiting),
        State.PREFILL: state.prefilling,
        State.DECODE: list(state.running.requests),
        State.RETIRING: list(state.retiring),
        State.PAUSED: list(state.paused),
        State.RESUMING: list(state.resuming),
        State.PARKED: list(state.parked),
    }
    seen = [r for requests in places.values() for r in requests]
    assert len(seen) == len(set(seen))
    assert set(seen) == state.live
    for place, requests in places.items():
        assert all(r.state is place for r in requests)


def holders(state: SchedulerState) -> list[Request]:
    """Requests that have a row and pages."""
    return [r for r in state.live if r.state in HOLDS_ROW]


def _nodes(radix: RadixCache) -> Iterator[Node]:
    todo = list(radix.root.children.values())
    while todo:
        node = todo.pop()
        yield node
        todo.extend(node.children.values())


def _path(node: Node | None) -> list[int]:
    pages: list[int] = []
    while node is not None and node.parent is not None:
        pages = node.pages.tolist() + pages
        node = node.parent
    return pages


class Watch:
    """Audits ``engine`` in every turn, and sees to it that its steps get somewhere.

    Whatever is handed out again, a page or a row, must be out of reach of every step in flight.

    Attributes:
        steps: steps planned.
        barren: the longest run of steps in which no request got a token or ended.
    """

    def __init__(self, engine: Engine) -> None:
        assert engine._runtime is not None
        self._state, self._limits = state_of(engine), limits_of(engine)
        core = engine._runtime._core
        self._plan, core.plan = core.plan, self._watched_plan
        pool, table = self._state.memory.pool, self._state.table
        self._allocate, pool.allocate = pool.allocate, self._watched_allocate
        self._acquire, table.acquire = table.acquire, self._watched_acquire
        self._page_used = np.zeros(pool.total + 1, dtype=np.int64)  # last step that names it
        self._row_used = np.zeros(table.count + 1, dtype=np.int64)
        self.steps = self.barren = 0
        self._since = 0
        self._progress = (0, 0)
        self._interval, self._most = 0, 0

    def retract_every(self, steps: int, *, most: int) -> None:
        """From now on retract somebody every so many steps, ``most`` times in all."""
        self._interval, self._most = steps, most

    def _watched_plan(self) -> ScheduleBatch | None:
        if self._most and self.steps % self._interval == 0 and (who := self._state.victims()):
            self._most -= 1
            self._state.retract(who[self._most % len(who)])
            self._since = self.steps
        batch = self._plan()
        state = self._state
        if batch is not None:
            self.steps += 1
            self._page_used[batch.inputs.page_tables] = batch.step
            self._row_used[batch.inputs.rows] = batch.step
        audit(state)
        progress = (sum(len(r.output) for r in state.live), sum(state.finished.values()))
        if progress != self._progress or batch is None:
            self._progress, self._since = progress, self.steps
        self.barren = max(self.barren, self.steps - self._since)
        assert self.steps - self._since <= self._bound(), "steps go by and nothing comes of them"
        return batch

    def _watched_allocate(self, count: int) -> PageIds:
        pages = self._allocate(count)
        assert (self._page_used[pages] <= self._state.completed).all(), "a page in use was reused"
        return pages

    def _watched_acquire(self, request: Request) -> int:
        row = self._acquire(request)
        assert self._row_used[row] <= self._state.completed, "a row in use was reused"
        return row

    def _bound(self) -> int:
        """Steps that it may take to read in everything there is, and once more after retraction."""
        chunk = max(1, min(self._limits.chunk_tokens, self._limits.batch_tokens))
        reading = sum(-(-r.length // chunk) for r in self._state.live)
        return 4 * (self._limits.depth + 2) + 2 * reading
