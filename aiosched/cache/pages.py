"""The KV page pool: bulk allocation from a free stack, and release behind a fence."""

from __future__ import annotations

import heapq
from enum import IntEnum
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

PageIds: TypeAlias = NDArray[np.int32]

NO_STEP = -1
"""The fence of a page that no step references."""


class OutOfPages(Exception):
    """More pages were asked for than are free."""

    def __init__(self, requested: int, free: int, arriving: int) -> None:
        super().__init__(f"{requested} KV pages requested, {free} free and {arriving} arriving")
        self.requested = requested
        self.free = free
        self.arriving = arriving


class PageOwnershipError(RuntimeError):
    """A page changed hands without belonging to the hand that gave it (`check=True` only)."""


class PagePool:
    """Hands out the ids of `num_pages` KV pages of `page_size` tokens each.

    Page ids run from 1 to `num_pages`; page 0 is padding and belongs to nobody. A page is always
    exactly one of free, arriving (released, its last reader still in flight) or held.

    With `check=True` the owner of each page is recorded and each change of hands is verified,
    which costs a pass over the pages concerned.
    """

    def __init__(self, num_pages: int, page_size: int, *, check: bool = False) -> None:
        if num_pages < 1 or page_size < 1:
            raise ValueError(f"no pool of {num_pages} pages of {page_size} tokens")
        self.page_size = page_size
        self._stack: PageIds = np.arange(num_pages, 0, -1, dtype=np.int32)
        self._free = num_pages
        self._arriving = 0
        self._completed = NO_STEP
        self._waiting: dict[int, list[PageIds]] = {}
        self._fences: list[int] = []  # heap of the keys of _waiting
        self._owners = _Owners(num_pages) if check else None

    @property
    def total(self) -> int:
        """Usable pages, without padding."""
        return len(self._stack)

    @property
    def free(self) -> int:
        """Pages that `allocate` can hand out now."""
        return self._free

    @property
    def arriving(self) -> int:
        """Released pages whose fence has not been passed."""
        return self._arriving

    @property
    def held(self) -> int:
        """Pages in use, those of the prefix cache included."""
        return self.total - self._free - self._arriving

    def allocate(self, count: int) -> PageIds:
        """Take `count` free pages, all or none.

        Returns:
            int32 [count], the caller's own array.

        Raises:
            OutOfPages: fewer than `count` pages are free.
        """
        if count < 0:
            raise ValueError(f"cannot allocate {count} pages")
        if count > self._free:
            raise OutOfPages(count, self._free, self._arriving)
        left = self._free - count
        pages = self._stack[left : self._free][::-1].copy()
        if self._owners is not None:
            self._owners.move(pages, _Owner.FREE, _Owner.HELD)
        self._free = left
        return pages

    def release(self, pages: PageIds, fence: int) -> None:
        """Give `pages` (int32 [n]) back once step `fence`, the last to reference them, is complete.

        Raises:
            PageOwnershipError: with `check=True`, if a page is not held, is held by the prefix
                cache, or is named twice. Nothing has changed then.
        """
        if not len(pages):
            return
        free_now = fence <= self._completed
        if self._owners is not None:
            self._owners.move(pages, _Owner.HELD, _Owner.FREE if free_now else _Owner.ARRIVING)
        if free_now:
            self._push(pages)
            return
        if fence not in self._waiting:
            self._waiting[fence] = []
            heapq.heappush(self._fences, fence)
        # A copy: `pages` is often a view of a page table whose row is reused before the fence.
        self._waiting[fence].append(np.array(pages, dtype=np.int32))
        self._arriving += len(pages)

    def advance(self, completed_step: int) -> int:
        """Note that every step up to `completed_step` is complete.

        Returns:
            The number of pages that became free.
        """
        if completed_step < self._completed:
            raise ValueError(f"step {completed_step} completed after step {self._completed}")
        self._completed = completed_step
        before = self._free
        while self._fences and self._fences[0] <= completed_step:
            for pages in self._waiting.pop(heapq.heappop(self._fences)):
                if self._owners is not None:
                    self._owners.move(pages, _Owner.ARRIVING, _Owner.FREE)
                self._arriving -= len(pages)
                self._push(pages)
        return self._free - before

    def adopt(self, pages: PageIds) -> None:
        """Record that held pages now belong to the prefix cache (a check, no bookkeeping)."""
        if self._owners is not None:
            self._owners.move(pages, _Owner.HELD, _Owner.CACHED)

    def disown(self, pages: PageIds) -> None:
        """Record that the prefix cache gave up pages, which are merely held again."""
        if self._owners is not None:
            self._owners.move(pages, _Owner.CACHED, _Owner.HELD)

    def audit(self) -> None:
        """With `check=True`, recount every page and raise PageOwnershipError on a discrepancy."""
        if self._owners is not None:
            arriving = [pages for batch in self._waiting.values() for pages in batch]
            self._owners.expect(_Owner.FREE, self._stack[: self._free])
            self._owners.expect(_Owner.ARRIVING, np.concatenate([self._stack[:0], *arriving]))

    def _push(self, pages: PageIds) -> None:
        self._stack[self._free : self._free + len(pages)] = pages
        self._free += len(pages)


class _Owner(IntEnum):
    PADDING = 0
    FREE = 1
    ARRIVING = 2
    HELD = 3
    CACHED = 4


class _Owners:
    """The owner of each page, for `PagePool(check=True)`."""

    def __init__(self, num_pages: int) -> None:
        self._owner = np.full(num_pages + 1, _Owner.FREE, dtype=np.uint8)
        self._owner[0] = _Owner.PADDING

    def move(self, pages: PageIds, source: _Owner, target: _Owner) -> None:
        """Hand pages over, or raise and leave all as it was."""
        unknown = pages[(pages < 0) | (pages >= len(self._owner))]
        if len(unknown):
            raise PageOwnershipError(f"no such page: {unknown.tolist()}")
        if len(np.unique(pages)) != len(pages):
            raise PageOwnershipError(f"a page is named twice: {pages.tolist()}")
        for page in pages[self._owner[pages] != source]:
            owner = _Owner(self._owner[page])
            raise PageOwnershipError(
                f"page {page} is {owner.name}, not {source.name}: it cannot become {target.name}"
            )
        self._owner[pages] = target

    def expect(self, owner: _Owner, pages: PageIds) -> None:
        """Raise unless `pages` are exactly the pages of `owner`, each once."""
        recorded = np.flatnonzero(self._owner == owner)
        if not np.array_equal(np.sort(pages), recorded):
            raise PageOwnershipError(f"{owner.name}: {pages.tolist()} != {recorded.tolist()}")
