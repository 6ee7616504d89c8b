"""KVMemory: admission, growth, sharing, release."""

from __future__ import annotations

import numpy as np
import pytest
from engines import prompt
from kv_audit import audit
from scheduler_parts import admit, land, make_request, make_state, run_step

from aiosched.scheduler.memory import Admission
from aiosched.scheduler.state import SchedulerState


def pages_of(state: SchedulerState, row: int) -> list[int]:
    return state.table.page_table[row, : state.table.num_pages[row]].tolist()


@pytest.mark.parametrize(("tokens", "pages"), [(1, 1), (4, 1), (5, 2), (16, 4)])
def test_admission_gives_pages_for_all_tokens(tokens: int, pages: int) -> None:
    state, request = make_state(), make_request(tokens)
    admit(state, request)
    assert len(set(pages_of(state, request.row))) == pages
    assert state.memory.pool.free == 16 - pages
    audit(state)


def test_a_refused_admission_changes_nothing() -> None:
    state = make_state(pages=4)
    cached = prompt(1, 8)
    first = make_request(cached)
    admit(state, first)
    land(state, run_step(state, first), first)
    state.memory.share(first)
    newcomer = make_request(cached + prompt(2, 8))
    before = state.memory.pool.free, state.table.free
    assert state.memory.admit(newcomer, 1) is Admission.SHORT
    assert (state.memory.pool.free, state.table.free) == before
    assert newcomer.row == 0 and newcomer.node is None
    audit(state)


def test_pages_behind_a_fence_make_an_admission_wait() -> None:
    state = make_state(pages=4, prefix_cache=False)
    leaver, newcomer = make_request(12), make_request(12)
    admit(state, leaver)
    step = run_step(state, leaver)
    state.finish(leaver, "abort")
    assert state.memory.admit(newcomer, 0) is Admission.LATER
    state.memory.advance(step)
    assert state.memory.admit(newcomer, 0) is Admission.DONE


def test_headroom_must_stay_beyond_its_own_pages() -> None:
    state = make_state(pages=4)
    assert state.memory.admit(make_request(9), 2) is Admission.SHORT
    assert state.memory.admit(make_request(9), 1) is Admission.DONE


def test_at_least_one_token_is_computed() -> None:
    state, ids = make_state(), prompt(1, 8)
    first, again = make_request(ids), make_request(ids)
    admit(state, first)
    land(state, run_step(state, first), first)
    state.memory.share(first)
    admit(state, again)
    assert state.table.kv_len[again.row] == 4 == again.cached_tokens
    assert pages_of(state, again.row)[0] == pages_of(state, first.row)[0]
    audit(state)


def test_only_pages_that_a_finished_step_wrote_are_shared() -> None:
    state, request = make_state(), make_request(12)
    admit(state, request)
    run_step(state, request)
    state.memory.share(request)
    assert state.table.num_shared[request.row] == 0
    state.table.kv_done[request.row] = 7  # a chunk of it has landed
    state.memory.share(request)
    assert state.table.num_shared[request.row] == 1
    audit(state)


def test_the_copy_that_is_dropped_is_free_behind_its_last_step() -> None:  # C45
    state, ids = make_state(), prompt(1, 9)
    both = [make_request(ids), make_request(ids)]
    for request in both:
        admit(state, request)
    step = run_step(state, *both)
    first, second = (pages_of(state, request.row) for request in both)
    assert not set(first) & set(second)
    later = run_step(state, *both)
    land(state, step, *both)
    for request in both:
        state.memory.share(request)
    assert pages_of(state, both[1].row) == [*first[:2], second[2]]
    assert state.memory.pool.arriving == 2
    state.memory.advance(later)
    assert state.memory.pool.arriving == 0
    audit(state)


def test_what_is_not_trusted_does_not_reach_the_cache() -> None:
    state, request = make_state(), make_request(12)
    admit(state, request)
    land(state, run_step(state, request), request)
    state.finish(request, "error", RuntimeError())
    assert state.memory.pages_cached == 0
    assert state.memory.pool.free == 16


def test_the_pages_of_an_answer_are_kept_for_its_continuation() -> None:
    state, request = make_state(), make_request(6)
    admit(state, request)
    for _ in range(3):
        land(state, run_step(state, request), request)
    state.finish(request, "length")
    assert state.memory.pages_cached == 2  # 6 + 3 tokens, of which the last was never written
    follower = make_request([*request.tokens().tolist(), 5])
    admit(state, follower)
    assert follower.cached_tokens == 8
    audit(state)


def test_a_prefix_is_not_evicted_from_under_the_one_that_is_admitted_onto_it() -> None:
    state, ids = make_state(pages=4), prompt(1, 8)
    first = make_request(ids)
    admit(state, first)
    land(state, run_step(state, first), first)
    state.finish(first, "length")
    assert state.memory.pages_cached == 2
    follower = make_request(ids + prompt(2, 8))
    admit(state, follower)
    assert follower.cached_tokens == 8
    assert len(set(pages_of(state, follower.row))) == 4
    audit(state)


def test_growing_gives_each_row_its_next_page() -> None:
    state = make_state()
    both = [make_request(4), make_request(8)]
    for request in both:
        admit(state, request)
    rows = np.array([request.row for request in both])
    state.memory.grow(rows)
    assert state.table.num_pages[rows].tolist() == [2, 3]
    assert 0 not in pages_of(state, rows[0]) + pages_of(state, rows[1])
    audit(state)
