"""The prefix cache: a radix tree from token ids to the KV pages that hold them.

After RadixAttention in SGLang (arXiv 2312.07104), over whole pages.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from aiosched.cache.pages import NO_STEP, PageIds, PagePool

TokenIds = Sequence[int] | NDArray[np.int32]


class Node:
    """An edge of the tree and its lower end: a run of pages that always follow one another.

    A node stands for the whole prefix from the root to its end, and does so for life: when an
    edge is split the new node takes the upper half, so a handle never changes its meaning.
    """

    __slots__ = (
        "children",
        "fence",
        "key",
        "last_used",
        "locks",
        "pages",
        "parent",
        "queued",
        "serial",
    )

    def __init__(self, parent: Node | None, key: bytes, pages: PageIds, serial: int) -> None:
        self.parent = parent  # None: the root, or evicted
        self.key = key  # token ids of the edge, int32, whole pages
        self.pages = pages
        self.serial = serial
        self.children: dict[bytes, Node] = {}  # by the first page of their keys
        self.locks = 0
        self.fence = NO_STEP  # last step known to read the pages
        self.last_used = 0
        self.queued = False  # has an entry in the eviction queue


class Match(NamedTuple):
    """The longest cached prefix: its node and page ids, int32 [matched pages]."""

    node: Node
    pages: PageIds


class InsertResult(NamedTuple):
    """What `RadixCache.insert` made of the caller's pages.

    `node` is locked for the caller. `pages` (int32 [whole pages of the tokens]) belong to the
    tree and are the ones to put in the page table; `duplicates` (int32) still belong to the
    caller, who releases them behind its own fence.
    """

    node: Node
    pages: PageIds
    duplicates: PageIds


class RadixCache:
    """Keeps the pages of finished and running requests findable by their tokens.

    Edges hold runs of pages. A node per page would need no splitting, but every match, lock and
    unlock would walk each page of the prompt in Python: 4,096 nodes for a prompt of 4,096 tokens
    at page size 1. Here a hit is one dictionary look-up and one `memcmp` per edge, and a lock
    touches a handful of nodes.

    The tree behaves, eviction order included, as if each page had its own node. It evicts the end
    of an edge when that is enough.

    A match is a hint until it is locked: lock it before anything can evict. A locked node, with
    every node above it, keeps its pages.
    """

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._page_bytes = pool.page_size * np.dtype(np.int32).itemsize
        self._clock = 0
        self._serial = 0
        self._total = 0
        self._evictable = 0
        self._queue: list[tuple[int, int, Node]] = []  # heap: (last_used, serial, node)
        self.root = self._new_node(None, b"", np.empty(0, dtype=np.int32))

    @property
    def pages_total(self) -> int:
        """Pages that belong to the tree."""
        return self._total

    @property
    def pages_evictable(self) -> int:
        """Pages of the tree that no lock protects."""
        return self._evictable

    def match(self, tokens: TokenIds, limit_pages: int) -> Match:
        """Find the longest cached prefix of `tokens` in whole pages, at most `limit_pages`.

        The prefix becomes the most recently used. A caller that must compute at least one token
        passes `(len(tokens) - 1) // page_size`.
        """
        path = self._follow(self._encode(tokens, limit_pages))
        return Match(path[-1], _pages_of(path))

    def lock(self, node: Node) -> None:
        """Protect `node` and the path above it from eviction. Locks add up.

        Raises:
            RuntimeError: `node` was evicted since it was matched.
        """
        if node.parent is None and node is not self.root:
            raise RuntimeError("cannot lock an evicted node: lock a match before anything evicts")
        for step in _upwards(node):
            self._add_lock(step)

    def unlock(self, node: Node, fence: int) -> None:
        """Take one lock off `node` and the path above it.

        Step `fence` is the last one of the caller that reads these pages: when they are evicted,
        the pool keeps them until it is complete.

        Raises:
            RuntimeError: `node` is not locked.
        """
        if node is not self.root and not node.locks:
            raise RuntimeError("cannot unlock a node that is not locked")
        for step in _upwards(node):
            step.fence = max(step.fence, fence)
            step.locks -= 1
            if not step.locks:
                self._evictable += len(step.pages)
                self._enqueue_if_leaf(step)

    def insert(self, tokens: TokenIds, pages: PageIds, held: Node) -> InsertResult:
        """Give the whole pages of `tokens` to the tree, and move the lock on `held` to their end.

        `pages` (int32) are the caller's pages in the order of its tokens; those beyond the last
        whole page are ignored and stay the caller's. Where a prefix is cached already, the page
        of the tree wins. `held` is the node that the caller has locked: the root, or a prefix of
        `tokens` whose pages are the first of `pages`.

        Raises:
            ValueError: `pages` are too few, or `held` is not a prefix of `tokens`.
        """
        key = self._encode(tokens, len(tokens))
        count = len(key) // self._page_bytes
        if len(pages) < count:
            raise ValueError(f"{len(pages)} pages for {count} whole pages of tokens")
        path = self._follow(key)
        if held not in path:
            raise ValueError("the held node is not a prefix of the tokens")

        cached = _pages_of(path)
        offered, added = pages[: len(cached)], np.array(pages[len(cached) : count], dtype=np.int32)
        if len(added):
            self._pool.adopt(added)
            path.append(self._append(path[-1], key[len(cached) * self._page_bytes :], added))
        # `held` stays locked throughout: only the nodes below it are new to this lock.
        for node in path[path.index(held) + 1 :]:
            self._add_lock(node)
        return InsertResult(path[-1], _pages_of(path), offered[offered != cached])

    def evict(self, count: int) -> int:
        """Release `count` pages to the pool, or all that no lock protects if they are fewer.

        Least recently used first, and a page only after all that follow it.

        Returns:
            The number of pages released. Those that a step in flight may read arrive in the pool
            when it is complete.
        """
        released = 0
        by_fence: dict[int, list[PageIds]] = {}
        while released < count and (node := self._pop_coldest()):
            surplus = len(node.pages) - (count - released)
            if surplus > 0:
                self._split(node, surplus)
            self._remove(node)
            by_fence.setdefault(node.fence, []).append(node.pages)
            released += len(node.pages)
        for fence, runs in by_fence.items():
            pages = np.concatenate(runs)
            self._pool.disown(pages)
            self._pool.release(pages, fence)
        return released

    def _encode(self, tokens: TokenIds, limit_pages: int) -> bytes:
        page_size = self._pool.page_size
        count = max(0, min(len(tokens) // page_size, limit_pages))
        return np.asarray(tokens[: count * page_size], dtype=np.int32).tobytes()

    def _follow(self, key: bytes) -> list[Node]:
        """The nodes from the root to the end of the cached part of `key`, touched.

        Splits the last edge where `key` ends or departs from it.
        """
        self._clock += 1
        node, path, at = self.root, [self.root], 0
        while child := node.children.get(key[at : at + self._page_bytes]):
            if key.startswith(child.key, at):
                node = child
            else:
                node = self._split(child, self._shared_pages(child.key, key, at))
            node.last_used = self._clock
            path.append(node)
            at += len(node.key)
        return path

    def _shared_pages(self, edge: bytes, key: bytes, at: int) -> int:
        ours = np.frombuffer(edge, dtype=np.int32)
        theirs = np.frombuffer(key, dtype=np.int32, offset=at)
        shorter = min(len(ours), len(theirs))
        differ = np.flatnonzero(ours[:shorter] != theirs[:shorter])
        return int(differ[0] if len(differ) else shorter) // self._pool.page_size

    def _split(self, node: Node, keep: int) -> Node:
        """Cut the edge of `node` after `keep` pages and return the new upper half."""
        assert node.parent is not None
        cut = keep * self._page_bytes
        upper = self._new_node(node.parent, node.key[:cut], node.pages[:keep])
        # Whoever locked or read the lower half did the same to the upper one.
        upper.locks, upper.fence, upper.last_used = node.locks, node.fence, node.last_used
        node.parent.children[node.key[: self._page_bytes]] = upper
        node.parent, node.key, node.pages = upper, node.key[cut:], node.pages[keep:]
        upper.children[node.key[: self._page_bytes]] = node
        return upper

    def _append(self, parent: Node, key: bytes, pages: PageIds) -> Node:
        node = self._new_node(parent, key, pages)
        node.last_used = self._clock
        parent.children[key[: self._page_bytes]] = node
        self._total += len(pages)
        self._evictable += len(pages)
        return node

    def _remove(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        del parent.children[node.key[: self._page_bytes]]
        node.parent = None
        self._total -= len(node.pages)
        self._evictable -= len(node.pages)
        if not parent.locks:
            self._enqueue_if_leaf(parent)

    def _new_node(self, parent: Node | None, key: bytes, pages: PageIds) -> Node:
        self._serial += 1
        return Node(parent, key, pages, self._serial)

    def _add_lock(self, node: Node) -> None:
        if not node.locks:
            self._evictable -= len(node.pages)
        node.locks += 1

    # The eviction queue is lazy. Every leaf without locks has an entry; a node has at most one.
    # Being touched, locked or extended leaves the entry as it is, too early or void, and the one
    # who pops it puts that right. Each such correction is paid for by the call that made it due,
    # so evicting k pages of n stays O(k log n).

    def _enqueue_if_leaf(self, node: Node) -> None:
        if not node.children and not node.queued and node is not self.root:
            node.queued = True
            heapq.heappush(self._queue, (node.last_used, node.serial, node))

    def _pop_coldest(self) -> Node | None:
        while self._queue:
            last_used, _, node = heapq.heappop(self._queue)
            node.queued = False
            if node.locks:
                continue  # unlock() enqueues it
            if node.last_used == last_used and not node.children:
                return node
            self._enqueue_if_leaf(node)
        return None


def _upwards(node: Node) -> Iterator[Node]:
    """`node` and its ancestors, without the root."""
    while node.parent is not None:
        yield node
        node = node.parent


def _pages_of(path: list[Node]) -> PageIds:
    return np.concatenate([node.pages for node in path])
