"""KVMemory: which pages a running request has, from admission to its one release.

A row's page table begins with pages that the prefix cache owns (``num_shared`` of them, locked by
the request) and goes on with pages of its own (up to ``num_pages``). Whole pages move from the
second kind to the first when a finished step has written them, never earlier: what an aborted or
retracted step might still be writing is not shared.
"""

from __future__ import annotations

from enum import Enum

import numpy as np
from numpy.typing import NDArray

from aiosched.cache.pages import NO_STEP, PagePool
from aiosched.cache.radix import Node, RadixCache
from aiosched.scheduler.requests import Request
from aiosched.scheduler.rows import RowTable


class Admission(Enum):
    """What became of an attempt to admit a request."""

    DONE = 0
    LATER = 1  # there are pages enough, some of them still behind a fence
    SHORT = 2  # there are not enough


class KVMemory:
    """The page pool, the prefix cache and the page tables of all rows."""

    def __init__(
        self, num_pages: int, page_size: int, table: RowTable, *, prefix_cache: bool, check: bool
    ) -> None:
        self.page_size = page_size
        self.table = table
        self.pool = PagePool(num_pages, page_size, check=check)
        self.radix = RadixCache(self.pool) if prefix_cache else None

    @property
    def pages_cached(self) -> int:
        """Pages kept for later prompts that no running request holds."""
        return self.radix.pages_evictable if self.radix is not None else 0

    @property
    def available(self) -> int:
        """Pages that can be had without taking any from a running request, some after a fence."""
        return self.pool.free + self.pool.arriving + self.pages_cached

    def pages_for(self, tokens: int) -> int:
        """Pages that hold ``tokens`` tokens."""
        return -(-tokens // self.page_size)

    def make_room(self, count: int) -> bool:
        """Evict cached prefixes until ``count`` pages are free or on their way.

        False if some are still behind a fence, or do not exist.
        """
        short = count - self.pool.free - self.pool.arriving
        if short > 0 and self.radix is not None:
            self.radix.evict(short)
        return self.pool.free >= count

    def admit(self, request: Request, headroom: int) -> Admission:
        """Give ``request`` a row and pages for all tokens it has, beginning with cached ones.

        ``headroom`` pages must stay available beyond its own. Unless it is admitted nothing has
        changed, but for what was evicted.
        """
        tokens = request.tokens()
        # At least one token is computed, since its logits are needed.
        usable = 0 if request.prompt_logprobs is not None else (len(tokens) - 1) // self.page_size
        node: Node | None = None
        shared = np.empty(0, dtype=np.int32)
        if self.radix is not None:
            node, shared = self.radix.match(tokens, usable)
            self.radix.lock(node)
        needed = self.pages_for(len(tokens)) - len(shared)
        enough = needed + headroom <= self.available
        if not enough or not self.make_room(needed):
            if node is not None and self.radix is not None:
                self.radix.unlock(node, fence=NO_STEP)
            return Admission.LATER if enough else Admission.SHORT
        row = self.table.acquire(request)
        request.node = node
        request.target = len(tokens)
        total = len(shared) + needed
        self.table.page_table[row, : len(shared)] = shared
        self.table.page_table[row, len(shared) : total] = self.pool.allocate(needed)
        self.table.num_shared[row] = len(shared)
        self.table.num_pages[row] = total
        self.table.kv_len[row] = self.table.kv_done[row] = len(shared) * self.page_size
        if not request.retractions:  # else it may have found what it computed itself
            request.cached_tokens = len(shared) * self.page_size
        return Admission.DONE

    def grow(self, rows: NDArray[np.int64]) -> None:
        """Give each of ``rows`` one more page; there must be that many free."""
        counts = self.table.num_pages[rows]
        self.table.page_table[rows, counts] = self.pool.allocate(len(rows))
        self.table.num_pages[rows] = counts + 1

    def share(self, request: Request) -> None:
        """Hand the whole pages that finished steps have written to the prefix cache.

        Where the cache has such a page already, the page table now points at that one, and the
        request's own copy is released behind the last step that may read it.
        """
        if self.radix is None or request.node is None:
            return
        row = request.row
        full = int(self.table.kv_done[row]) // self.page_size
        if full <= self.table.num_shared[row]:
            return
        tokens = request.tokens(full * self.page_size)
        own = self.table.page_table[row, :full]
        result = self.radix.insert(tokens, own, request.node)
        request.node = result.node
        self.table.page_table[row, :full] = result.pages
        self.table.num_shared[row] = full
        if len(result.duplicates):
            self.pool.release(result.duplicates, int(self.table.last_step[row]))

    def release(self, request: Request, *, keep: bool = True) -> None:
        """The one way in which a request gives its row and pages back.

        ``kv_done`` says how many tokens are worth keeping for the prefix cache, ``num_pages`` how
        many pages there are to give back, and ``last_step`` is the fence behind which all of it
        becomes free. ``keep=False``: what was computed is not trusted.
        """
        if keep:
            self.share(request)
        row = request.row
        fence = int(self.table.last_step[row])
        own = self.table.page_table[row, self.table.num_shared[row] : self.table.num_pages[row]]
        self.pool.release(own, fence)
        if self.radix is not None and request.node is not None:
            self.radix.unlock(request.node, fence)
        request.node = None
        self.table.release(request)

    def advance(self, completed_step: int) -> None:
        """Steps up to this one are done: what waited for them is free."""
        self.pool.advance(completed_step)
        self.table.advance(completed_step)
