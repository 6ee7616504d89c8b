from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from aiosched.cache.pages import NO_STEP, OutOfPages, PageIds, PageOwnershipError, PagePool


def new_pool(num_pages: int = 8) -> PagePool:
    return PagePool(num_pages, page_size=16, check=True)


def counts(pool: PagePool) -> tuple[int, int, int]:
    pool.audit()
    assert pool.free + pool.arriving + pool.held == pool.total
    return pool.free, pool.arriving, pool.held


def test_a_new_pool_is_all_free() -> None:
    pool = new_pool(8)
    assert counts(pool) == (8, 0, 0)
    assert pool.total == 8
    assert pool.page_size == 16


def test_padding_is_never_handed_out_and_every_other_page_is_once() -> None:
    pages = new_pool(8).allocate(8)
    assert pages.dtype == np.int32
    assert sorted(pages.tolist()) == list(range(1, 9))


def test_allocating_nothing_gives_an_empty_array() -> None:
    pool = new_pool()
    assert pool.allocate(0).shape == (0,)
    assert counts(pool) == (8, 0, 0)


def test_allocation_is_all_or_nothing_and_names_the_numbers() -> None:
    pool = new_pool(8)
    pool.release(pool.allocate(3), fence=1)
    with pytest.raises(OutOfPages, match="6 KV pages requested, 5 free and 3 arriving") as raised:
        pool.allocate(6)
    assert (raised.value.requested, raised.value.free, raised.value.arriving) == (6, 5, 3)
    assert counts(pool) == (5, 3, 0)
    assert len(pool.allocate(5)) == 5


@pytest.mark.parametrize(("num_pages", "page_size"), [(0, 16), (8, 0)])
def test_a_pool_has_pages_and_pages_have_tokens(num_pages: int, page_size: int) -> None:
    with pytest.raises(ValueError, match="no pool"):
        PagePool(num_pages, page_size)


def test_a_negative_count_is_refused() -> None:
    with pytest.raises(ValueError, match="-1"):
        new_pool().allocate(-1)


def test_pages_come_back_when_their_fence_is_passed_and_not_before() -> None:
    pool = new_pool(8)
    pool.release(pool.allocate(5), fence=3)
    assert counts(pool) == (3, 5, 0)
    assert pool.advance(2) == 0
    assert counts(pool) == (3, 5, 0)
    assert pool.advance(3) == 5
    assert counts(pool) == (8, 0, 0)


def test_fences_may_be_released_out_of_order() -> None:
    pool = new_pool(8)
    late, early, also_early = pool.allocate(4), pool.allocate(2), pool.allocate(1)
    pool.release(late, fence=7)
    pool.release(early, fence=5)
    pool.release(also_early, fence=5)
    assert pool.advance(6) == 3
    assert counts(pool) == (4, 4, 0)
    assert pool.advance(9) == 4


def test_a_fence_that_is_passed_already_frees_at_once() -> None:
    pool = new_pool(8)
    pool.advance(4)
    pool.release(pool.allocate(2), fence=4)
    assert counts(pool) == (8, 0, 0)


def test_pages_that_no_step_references_are_free_at_once() -> None:
    pool = new_pool(8)
    pages = pool.allocate(2)
    pool.release(pages[:1], NO_STEP)
    assert counts(pool) == (7, 0, 1)
    pool.release(pages[1:], fence=0)
    assert counts(pool) == (7, 1, 0), "step 0 has not completed yet"


def test_steps_complete_in_order() -> None:
    pool = new_pool()
    pool.advance(4)
    assert pool.advance(4) == 0
    with pytest.raises(ValueError, match="step 3 completed after step 4"):
        pool.advance(3)


def test_a_release_outlives_the_page_table_row_it_was_read_from() -> None:
    pool = new_pool(8)
    page_table = np.zeros((2, 8), dtype=np.int32)
    page_table[1, :4] = pool.allocate(4)
    pool.release(page_table[1, :4], fence=1)
    page_table[1] = 0
    pool.advance(1)
    assert sorted(pool.allocate(8).tolist()) == list(range(1, 9))


def test_an_allocation_outlives_later_releases() -> None:
    pool = new_pool(8)
    first, second = pool.allocate(4), pool.allocate(4)
    before = first.tolist()
    pool.release(second[::-1], NO_STEP)
    pool.allocate(4)
    assert first.tolist() == before


def test_releasing_nothing_leaves_no_trace() -> None:
    pool = new_pool(8)
    pool.release(np.empty(0, dtype=np.int32), fence=5)
    assert counts(pool) == (8, 0, 0)


@pytest.mark.parametrize("first_fence", [NO_STEP, 3])
def test_check_catches_a_double_release(first_fence: int) -> None:
    pool = new_pool(8)
    pages = pool.allocate(2)
    pool.release(pages, first_fence)
    before = counts(pool)
    with pytest.raises(PageOwnershipError, match=f"page {pages[1]} is"):
        pool.release(pages[1:], fence=4)
    assert counts(pool) == before


@pytest.mark.parametrize(
    ("pages", "message"),
    [
        ([0], "page 0 is PADDING"),
        ([-1], "no such page"),
        ([9], "no such page"),
        ([1, 1], "named twice"),
        ([3], "page 3 is FREE"),
    ],
)
def test_check_catches_a_release_of_what_is_not_held(pages: list[int], message: str) -> None:
    pool = new_pool(8)
    pool.allocate(2)
    with pytest.raises(PageOwnershipError, match=message):
        pool.release(np.array([2, *pages], dtype=np.int32), fence=1)
    assert counts(pool) == (6, 0, 2)


def test_check_catches_the_release_of_a_cached_page() -> None:
    pool = new_pool(8)
    pages = pool.allocate(2)
    pool.adopt(pages)
    with pytest.raises(PageOwnershipError, match="CACHED"):
        pool.release(pages, fence=1)
    pool.disown(pages)
    pool.release(pages, fence=1)
    assert counts(pool) == (6, 2, 0)


def test_check_catches_a_page_with_two_caches() -> None:
    pool = new_pool(8)
    pages = pool.allocate(2)
    pool.adopt(pages)
    with pytest.raises(PageOwnershipError, match="CACHED, not HELD"):
        pool.adopt(pages[:1])


def test_check_catches_the_hand_out_of_a_page_that_is_not_free() -> None:
    pool = new_pool(8)
    pages = pool.allocate(1)
    pool._push(pages)  # the corruption that an unchecked double release leaves behind
    with pytest.raises(PageOwnershipError, match="FREE"):
        pool.audit()
    with pytest.raises(PageOwnershipError, match="not FREE"):
        pool.allocate(1)


def test_without_check_the_numbers_are_the_same() -> None:
    pool = PagePool(8, 16)
    pages = pool.allocate(6)
    pool.adopt(pages)
    pool.disown(pages)
    pool.release(pages[:4], fence=2)
    assert (pool.free, pool.arriving, pool.held) == (2, 4, 2)
    assert pool.advance(2) == 4
    pool.audit()
    assert pool.allocate(6).tolist() != []


class PoolMachine(RuleBasedStateMachine):
    """A pool against two sets and a list."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = new_pool(12)
        self.held: list[int] = []
        self.arriving: list[tuple[int, int]] = []
        self.completed = 0
        self.pool.advance(0)

    @rule(count=st.integers(0, 8))
    def allocate(self, count: int) -> None:
        if count > 12 - len(self.held) - len(self.arriving):
            with pytest.raises(OutOfPages):
                self.pool.allocate(count)
            return
        pages = self.pool.allocate(count).tolist()
        taken = {0, *self.held, *(page for _, page in self.arriving)}
        assert len(set(pages)) == count
        assert taken.isdisjoint(pages)
        self.held += pages

    @rule(data=st.data(), lead=st.integers(-1, 3))
    def release(self, data: st.DataObject, lead: int) -> None:
        count = data.draw(st.integers(0, len(self.held)))
        gone, self.held = self.held[:count], self.held[count:]
        fence = self.completed + lead
        pages: PageIds = np.array(gone, dtype=np.int32)
        self.pool.release(pages, fence)
        if lead > 0:
            self.arriving += [(fence, page) for page in gone]

    @rule(steps=st.integers(0, 2))
    def advance(self, steps: int) -> None:
        self.completed += steps
        landed = [entry for entry in self.arriving if entry[0] <= self.completed]
        self.arriving = [entry for entry in self.arriving if entry[0] > self.completed]
        assert self.pool.advance(self.completed) == len(landed)

    @invariant()
    def every_page_is_free_arriving_or_held(self) -> None:
        held, arriving = len(self.held), len(self.arriving)
        assert counts(self.pool) == (12 - held - arriving, arriving, held)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
