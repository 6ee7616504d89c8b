from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from aiosched.cache.pages import NO_STEP, OutOfPages, PageIds, PagePool
from aiosched.cache.radix import Node, RadixCache

Prefix = tuple[int, ...]


def new_cache(num_pages: int = 16, page_size: int = 2) -> tuple[PagePool, RadixCache]:
    pool = PagePool(num_pages, page_size, check=True)
    return pool, RadixCache(pool)


def text(letters: str, page_size: int = 2) -> list[int]:
    """Tokens of one page per letter; pages of different letters differ in their last token."""
    return [token for c in letters for token in [7] * (page_size - 1) + [ord(c)]]


def as_list(pages: PageIds) -> list[int]:
    return [int(page) for page in pages]


def insert(cache: RadixCache, pool: PagePool, letters: str, fence: int = NO_STEP) -> PageIds:
    """Run one request to its end: compute `letters`, leave them in the cache."""
    pages = pool.allocate(len(letters))
    result = cache.insert(text(letters, pool.page_size), pages, cache.root)
    pool.release(result.duplicates, fence)
    cache.unlock(result.node, fence)
    return result.pages


def cached(cache: RadixCache, pool: PagePool, letters: str) -> list[int]:
    return as_list(cache.match(text(letters, pool.page_size), len(letters)).pages)


def contents(cache: RadixCache, page_size: int) -> dict[Prefix, int]:
    """Every cached prefix of whole pages, with its last page; checks the tree on the way."""
    found: dict[Prefix, int] = {}
    unlocked = 0
    for prefix, node in walk(cache.root, ()):
        tokens = np.frombuffer(node.key, dtype=np.int32).tolist()
        assert len(tokens) == len(node.pages) * page_size > 0
        for i, page in enumerate(node.pages.tolist(), start=1):
            found[prefix + tuple(tokens[: i * page_size])] = page
        assert node.parent is not None
        if node.parent is not cache.root:
            assert node.parent.locks >= node.locks
            assert node.parent.fence >= node.fence
            assert node.parent.last_used >= node.last_used
        if not node.locks:
            unlocked += len(node.pages)
            assert node.children or node.queued, "a leaf that eviction cannot find"
    assert cache.pages_total == len(found)
    assert cache.pages_evictable == unlocked
    return found


def walk(node: Node, prefix: Prefix) -> Iterator[tuple[Prefix, Node]]:
    for first, child in node.children.items():
        assert child.key.startswith(first)
        assert child.parent is node
        yield prefix, child
        yield from walk(child, prefix + tuple(np.frombuffer(child.key, dtype=np.int32).tolist()))


# match


def test_an_empty_cache_matches_nothing() -> None:
    _, cache = new_cache()
    match = cache.match(text("AB"), 2)
    assert match.node is cache.root
    assert match.pages.tolist() == []
    assert match.pages.dtype == np.int32


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_match_ends_with_the_last_whole_page_that_agrees(page_size: int) -> None:
    pool, cache = new_cache(page_size=page_size)
    pages = insert(cache, pool, "ABCD").tolist()
    assert cached(cache, pool, "ABCD") == pages
    assert cached(cache, pool, "ABCDE") == pages
    assert cached(cache, pool, "ABXY") == pages[:2]
    assert cached(cache, pool, "BCD") == []
    almost_c = text("ABC", page_size)[:-1]
    assert cache.match(almost_c, 3).pages.tolist() == pages[:2]


def test_a_prompt_seen_before_keeps_a_token_to_compute() -> None:  # C46
    pool, cache = new_cache(page_size=16)
    pages = insert(cache, pool, "AB").tolist()
    prompt = text("AB", 16)
    match = cache.match(prompt, limit_pages=(len(prompt) - 1) // 16)
    assert match.pages.tolist() == pages[:1]
    assert cache.match(prompt, limit_pages=-1).pages.tolist() == []


def test_tokens_may_be_a_list_or_an_array() -> None:
    pool, cache = new_cache()
    pages = insert(cache, pool, "ABC").tolist()
    for tokens in (text("ABC"), tuple(text("ABC")), np.array(text("ABC"), dtype=np.int32)):
        assert cache.match(tokens, 3).pages.tolist() == pages
    strided = np.array([text("ABC"), text("XYZ")], dtype=np.int32).T.copy().T[0]
    assert cache.match(strided, 3).pages.tolist() == pages


def test_a_match_does_not_change_when_its_edge_is_split() -> None:
    pool, cache = new_cache()
    pages = insert(cache, pool, "ABCD").tolist()
    match = cache.match(text("ABCD"), 4)
    insert(cache, pool, "ABX")
    cache.lock(match.node)
    assert cache.evict(16) == 1
    assert cached(cache, pool, "ABCD") == pages


# insert


def test_of_two_equal_prompts_the_first_one_s_pages_win() -> None:  # C45
    pool, cache = new_cache(page_size=16)
    prompt = text("AB", 16)
    ours, theirs = pool.allocate(2), pool.allocate(2)
    first = cache.insert(prompt, ours, cache.root)
    second = cache.insert(prompt, theirs, cache.root)
    assert first.pages.tolist() == second.pages.tolist() == ours.tolist()
    assert first.duplicates.tolist() == []
    assert second.duplicates.tolist() == theirs.tolist()
    pool.release(second.duplicates, fence=1)
    pool.audit()
    assert (pool.free, pool.arriving, pool.held) == (12, 2, 2)

    cache.unlock(first.node, fence=1)
    assert cache.evict(2) == 0, "the second one still reads them"
    cache.unlock(second.node, fence=1)
    assert cache.evict(2) == 2


def test_only_the_new_pages_are_taken() -> None:
    pool, cache = new_cache()
    old = insert(cache, pool, "AB")
    match = cache.match(text("AB"), 2)
    cache.lock(match.node)
    own = pool.allocate(3)
    tokens = [*text("ABCD"), 7]
    result = cache.insert(tokens, np.concatenate([match.pages, own]), match.node)
    assert result.pages.tolist() == [*old.tolist(), *own[:2].tolist()]
    assert result.duplicates.tolist() == []
    pool.release(own[2:], NO_STEP)  # the partial page stayed the caller's
    assert contents(cache, 2).keys() == {tuple(text("ABCD"[:n])) for n in (1, 2, 3, 4)}


def test_the_lock_moves_to_the_inserted_pages() -> None:
    pool, cache = new_cache()
    held = cache.insert(text("AB"), pool.allocate(2), cache.root)
    longer = np.concatenate([held.pages, pool.allocate(2)])
    result = cache.insert(text("ABCD"), longer, held.node)
    assert cache.evict(4) == 0
    cache.unlock(result.node, fence=NO_STEP)
    assert cache.pages_evictable == 4
    with pytest.raises(RuntimeError, match="not locked"):
        cache.unlock(held.node, fence=NO_STEP)


def test_inserting_what_is_held_already_changes_nothing() -> None:
    pool, cache = new_cache()
    held = cache.insert(text("AB"), pool.allocate(2), cache.root)
    again = cache.insert([*text("AB"), 7], held.pages, held.node)
    assert again.node is held.node
    assert again.duplicates.tolist() == []
    cache.unlock(again.node, NO_STEP)
    assert cache.evict(cache.pages_evictable) == 2


def test_the_tree_keeps_its_own_copy_of_the_page_ids() -> None:
    pool, cache = new_cache()
    page_table = np.zeros((1, 8), dtype=np.int32)
    page_table[0, :2] = pool.allocate(2)
    result = cache.insert(text("AB"), page_table[0, :2], cache.root)
    expected = result.pages.tolist()
    page_table[:] = 0
    result.pages[:] = 0
    assert cached(cache, pool, "AB") == expected


def test_bad_inserts_are_refused_and_take_nothing() -> None:
    pool, cache = new_cache()
    pages = pool.allocate(2)
    with pytest.raises(ValueError, match="1 pages for 2 whole pages"):
        cache.insert(text("AB"), pages[:1], cache.root)
    held = cache.insert(text("AB"), pages, cache.root)
    with pytest.raises(ValueError, match="not a prefix"):
        cache.insert(text("XY"), pool.allocate(2), held.node)
    with pytest.raises(ValueError, match="not a prefix"):
        cache.insert(text("A"), held.pages, held.node)
    assert contents(cache, 2).keys() == {tuple(text("A")), tuple(text("AB"))}
    assert cache.pages_evictable == 0


# locks and fences


def test_evicted_pages_come_back_after_the_fence_of_their_last_reader() -> None:
    pool, cache = new_cache(num_pages=4)
    insert(cache, pool, "ABCD", fence=5)
    pool.advance(4)
    assert cache.evict(3) == 3
    assert (pool.free, pool.arriving, pool.held) == (0, 3, 1)
    with pytest.raises(OutOfPages):
        pool.allocate(1)
    assert pool.advance(5) == 3
    assert len(pool.allocate(3)) == 3


def test_the_latest_fence_counts_along_the_whole_path() -> None:
    pool, cache = new_cache()
    insert(cache, pool, "AB", fence=9)
    insert(cache, pool, "ABCD", fence=3)
    assert cache.evict(cache.pages_evictable) == 4
    assert pool.advance(3) == 4, "C and D, and the duplicates of A and B"
    assert pool.advance(8) == 0
    assert pool.advance(9) == 2


def test_a_split_gives_both_halves_the_locks_and_the_fence() -> None:
    pool, cache = new_cache()
    insert(cache, pool, "ABCD", fence=6)
    match = cache.match(text("ABCD"), 4)
    cache.lock(match.node)
    cache.lock(match.node)
    assert cached(cache, pool, "ABX") == match.pages.tolist()[:2]
    assert cache.evict(4) == 0
    cache.unlock(match.node, fence=2)
    assert cache.evict(4) == 0
    cache.unlock(match.node, fence=2)
    assert cache.evict(4) == 4
    assert pool.advance(5) == 0
    assert pool.advance(6) == 4


def test_locking_a_node_that_was_evicted_is_an_error() -> None:
    pool, cache = new_cache()
    insert(cache, pool, "ABCD")
    match = cache.match(text("ABCD"), 4)
    cache.evict(1)
    with pytest.raises(RuntimeError, match="evicted"):
        cache.lock(match.node)
    assert cache.pages_evictable == cache.pages_total == 3


def test_the_root_can_be_locked_and_unlocked_like_any_node() -> None:
    pool, cache = new_cache()
    insert(cache, pool, "A")
    cache.lock(cache.root)
    assert cache.pages_evictable == 1
    cache.unlock(cache.root, fence=3)
    assert cache.evict(cache.pages_evictable) == 1
    assert pool.free == pool.total


# eviction


def test_the_least_recently_used_goes_first_and_leaves_before_their_parents() -> None:
    pool, cache = new_cache()
    insert(cache, pool, "AB")
    insert(cache, pool, "AC")
    insert(cache, pool, "D")
    cached(cache, pool, "AB")
    left = []
    while cache.evict(1):
        left.append({"".join(map(chr, prefix[1::2])) for prefix in contents(cache, 2)})
    assert left == [{"A", "AB", "D"}, {"A", "AB"}, {"A"}, set()]
    assert pool.free == pool.total


def test_eviction_takes_no_more_than_asked() -> None:
    pool, cache = new_cache()
    pages = insert(cache, pool, "ABCDEF").tolist()
    assert cache.evict(2) == 2
    assert cached(cache, pool, "ABCDEF") == pages[:4]
    assert cache.evict(0) == 0
    assert cache.evict(99) == 4


def test_a_full_pool_gives_up_only_prefixes_that_nobody_reads() -> None:  # C47
    pool, cache = new_cache(num_pages=8)
    insert(cache, pool, "AB")
    insert(cache, pool, "CD")
    insert(cache, pool, "EF")
    in_use = cache.match(text("AB"), 2)
    cache.lock(in_use.node)
    with pytest.raises(OutOfPages):
        pool.allocate(7)
    assert cache.evict(7 - pool.free) == 4, "the two in use are not to be had"
    assert pool.free == 6
    assert cached(cache, pool, "AB") == in_use.pages.tolist()
    cache.unlock(in_use.node, NO_STEP)
    assert cache.evict(7 - pool.free) == 1
    assert len(pool.allocate(7)) == 7


def test_an_aborted_request_leaves_shared_pages_to_the_others() -> None:  # C47
    pool, cache = new_cache(num_pages=8)
    shared = pool.allocate(2)
    aborted = cache.insert(text("ABC"), np.concatenate([shared, pool.allocate(1)]), cache.root)
    second = cache.match(text("ABD"), 2)
    cache.lock(second.node)
    cache.unlock(aborted.node, fence=0)
    third = cache.match(text("AB"), 1)
    cache.lock(third.node)
    assert cache.evict(8) == 1
    assert cached(cache, pool, "ABC") == second.pages.tolist() == shared.tolist()
    cache.unlock(second.node, fence=1)
    assert cache.evict(8) == 1
    assert cached(cache, pool, "AB") == third.pages.tolist() == shared.tolist()[:1]


def test_clear_leaves_what_is_locked() -> None:
    pool, cache = new_cache()
    kept = cache.insert(text("AB"), pool.allocate(2), cache.root)
    insert(cache, pool, "ABC")
    insert(cache, pool, "XYZ")
    assert cache.evict(cache.pages_evictable) == 4
    assert cached(cache, pool, "ABC") == kept.pages.tolist()
    assert (cache.pages_total, cache.pages_evictable) == (2, 0)


def test_a_request_is_evicted_in_the_order_of_its_last_use_not_of_its_unlock() -> None:
    pool, cache = new_cache()
    early = cache.insert(text("A"), pool.allocate(1), cache.root)
    late = cache.insert(text("B"), pool.allocate(1), cache.root)
    cache.unlock(late.node, NO_STEP)
    cache.unlock(early.node, NO_STEP)
    cache.evict(1)
    assert contents(cache, 2).keys() == {tuple(text("B"))}


def test_an_insert_is_a_use() -> None:
    pool, cache = new_cache()
    insert(cache, pool, "A")
    cached(cache, pool, "A")
    insert(cache, pool, "B")
    cache.evict(1)
    assert contents(cache, 2).keys() == {tuple(text("B"))}


def test_what_is_left_of_a_trimmed_edge_keeps_its_last_use() -> None:
    pool, cache = new_cache()
    older = cache.insert(text("A"), pool.allocate(1), cache.root)
    insert(cache, pool, "BC")
    cache.evict(1)
    cache.unlock(older.node, NO_STEP)
    cache.evict(1)
    assert contents(cache, 2).keys() == {tuple(text("B"))}


@dataclass
class Request:
    tokens: list[int]
    pages: list[int]  # the page table
    shared: int  # the first pages of it that belong to the tree
    node: Node


class CacheMachine(RuleBasedStateMachine):
    """Requests that come, grow, are cached and go, against a dict of prefixes to pages."""

    NUM_PAGES = 14

    @initialize(page_size=st.integers(1, 3))
    def start(self, page_size: int) -> None:
        self.size = page_size
        self.pool, self.cache = new_cache(self.NUM_PAGES, page_size)
        self.running: list[Request] = []
        self.launched = self.completed = NO_STEP
        self.clock = 0
        # The model: what a node per page would know.
        self.tree: dict[Prefix, int] = {}
        self.used: dict[Prefix, int] = {}
        self.fences: dict[Prefix, int] = {}
        self.locks: Counter[Prefix] = Counter()
        self.arriving: dict[int, int] = {}

    def prefixes(self, tokens: list[int], count: int) -> list[Prefix]:
        return [tuple(tokens[: n * self.size]) for n in range(1, count + 1)]

    def touch(self, prefixes: list[Prefix]) -> None:
        self.clock += 1
        self.used.update(dict.fromkeys(prefixes, self.clock))

    def model_release(self, page: int, fence: int) -> None:
        if fence > self.completed:
            self.arriving[page] = fence

    def model_evict(self, count: int) -> int:
        evicted = 0
        while evicted < count:
            inner = {prefix[: -self.size] for prefix in self.tree}
            leaves = [p for p in self.tree if not self.locks[p] and p not in inner]
            if not leaves:
                break
            coldest = min(leaves, key=self.used.__getitem__)
            self.model_release(self.tree.pop(coldest), self.fences.pop(coldest, NO_STEP))
            evicted += 1
        return evicted

    def allocate(self, count: int) -> list[int]:
        """Allocate, evicting for it as the scheduler does; nothing if that is not enough."""
        self.evict(max(0, count - self.pool.free))
        if count > self.pool.free:
            return []
        pages = as_list(self.pool.allocate(count))
        assert self.owned().isdisjoint(pages), "a page was handed out that has an owner"
        return pages

    def owned(self) -> set[int]:
        own = [page for r in self.running for page in r.pages[r.shared :]]
        every = [*own, *self.tree.values(), *self.arriving]
        assert len(set(every)) == len(every), "a page has two owners"
        return set(every)

    @rule(count=st.integers(0, 5))
    def evict(self, count: int) -> None:
        assert self.cache.evict(count) == self.model_evict(count)

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=12))
    def admit(self, tokens: list[int]) -> None:
        limit = (len(tokens) - 1) // self.size
        hits = [p for p in self.prefixes(tokens, limit) if p in self.tree]
        match = self.cache.match(tokens, limit)
        self.touch(hits)
        assert match.pages.tolist() == [self.tree[p] for p in hits]
        self.cache.lock(match.node)
        self.locks.update(hits)
        own = self.allocate(-(-len(tokens) // self.size) - len(hits))
        if own:
            pages = match.pages.tolist() + own
            self.running.append(Request(tokens, pages, len(hits), match.node))
        else:
            self.unlock(match.node, tokens, len(hits), NO_STEP)

    def unlock(self, node: Node, tokens: list[int], count: int, fence: int) -> None:
        self.cache.unlock(node, fence)
        for prefix in self.prefixes(tokens, count):
            self.locks[prefix] -= 1
            self.fences[prefix] = max(self.fences.get(prefix, NO_STEP), fence)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=4))
    def decode(self, data: st.DataObject, tokens: list[int]) -> None:
        request = data.draw(st.sampled_from(self.running))
        grown = request.tokens + tokens
        need = -(-len(grown) // self.size) - len(request.pages)
        own = self.allocate(need)
        if len(own) == need:
            request.tokens, request.pages = grown, request.pages + own

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def keep(self, data: st.DataObject) -> None:
        self.insert(data.draw(st.sampled_from(self.running)))

    def insert(self, request: Request) -> None:
        whole = len(request.tokens) // self.size
        prefixes = self.prefixes(request.tokens, whole)
        mine = request.pages[:whole]
        expected = [self.tree.setdefault(p, page) for p, page in zip(prefixes, mine, strict=True)]
        self.touch(prefixes)
        self.locks.update(prefixes[request.shared :])
        pages = np.array(request.pages, dtype=np.int32)
        result = self.cache.insert(request.tokens, pages, request.node)
        duplicates = [page for page, kept in zip(mine, expected, strict=True) if page != kept]
        assert result.pages.tolist() == expected
        assert result.duplicates.tolist() == duplicates
        self.pool.release(result.duplicates, self.launched)
        for page in duplicates:
            self.model_release(page, self.launched)
        request.pages[:whole] = expected
        request.shared, request.node = whole, result.node

    @precondition(lambda self: self.running)
    @rule(data=st.data(), keep=st.booleans())
    def finish(self, data: st.DataObject, keep: bool) -> None:
        request = data.draw(st.sampled_from(self.running))
        if keep:
            self.insert(request)
        self.running = [other for other in self.running if other is not request]
        self.unlock(request.node, request.tokens, request.shared, self.launched)
        own = request.pages[request.shared :]
        self.pool.release(np.array(own, dtype=np.int32), self.launched)
        for page in own:
            self.model_release(page, self.launched)

    @precondition(lambda self: self.launched < self.completed + 2)
    @rule()
    def launch(self) -> None:
        self.launched += 1

    @precondition(lambda self: self.completed < self.launched)
    @rule()
    def commit(self) -> None:
        self.completed += 1
        landed = [page for page, fence in self.arriving.items() if fence <= self.completed]
        assert self.pool.advance(self.completed) == len(landed)
        for page in landed:
            del self.arriving[page]

    @rule()
    def clear(self) -> None:
        assert self.cache.evict(self.cache.pages_evictable) == self.model_evict(self.NUM_PAGES)

    @invariant()
    def every_page_has_one_owner(self) -> None:  # C49
        self.pool.audit()
        free = self.NUM_PAGES - len(self.owned())
        assert (self.pool.free, self.pool.arriving) == (free, len(self.arriving))
        assert self.pool.free + self.pool.arriving + self.pool.held == self.pool.total

    @invariant()
    def the_tree_holds_what_the_model_holds(self) -> None:
        assert contents(self.cache, self.size) == self.tree
        assert self.cache.pages_evictable == sum(not self.locks[p] for p in self.tree)

    @invariant()
    def a_page_table_names_only_pages_of_its_owner(self) -> None:
        for request in self.running:
            shared = self.prefixes(request.tokens, request.shared)
            assert request.pages[: request.shared] == [self.tree[p] for p in shared]

    def teardown(self) -> None:
        if not hasattr(self, "running"):
            return
        while self.running:
            request = self.running.pop()
            self.unlock(request.node, request.tokens, request.shared, self.launched)
            own = np.array(request.pages[request.shared :], dtype=np.int32)
            self.pool.release(own, self.launched)
        self.cache.evict(self.cache.pages_evictable)
        self.pool.advance(self.launched)
        assert self.pool.free == self.pool.total


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
