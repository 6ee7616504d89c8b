"""DecodePlanner: who gets a page, who waits, who is retracted, who can never go on."""

from __future__ import annotations

import pytest
from kv_audit import audit
from scheduler_parts import admit, land, make_request, make_state, run_step

from aiosched.errors import KVCacheExhausted
from aiosched.request import FinishReason
from aiosched.scheduler.decode import DecodePlanner
from aiosched.scheduler.requests import Request, State
from aiosched.scheduler.state import SchedulerState


def decoding(state: SchedulerState, *sizes: int, landed: bool = True) -> list[Request]:
    """Requests of these many tokens whose prompts were read in by one step."""
    requests = [make_request(size, 64) for size in sizes]
    for request in requests:
        admit(state, request)
    step = run_step(state, *requests)
    if landed:
        land(state, step, *requests)
    return requests


def rows(requests: list[Request]) -> list[int]:
    return [request.row for request in requests]


def test_rows_with_room_in_their_last_page_need_none() -> None:
    state = make_state(pages=2)
    requests = decoding(state, 3, 2)
    assert DecodePlanner(state).plan(8).rows.tolist() == rows(requests)
    assert state.memory.pool.free == 0 and not state.retractions


def test_each_row_that_crosses_into_a_page_gets_one() -> None:
    state = make_state(pages=6)
    requests = decoding(state, 4, 3, 8)
    assert DecodePlanner(state).plan(8).rows.tolist() == rows(requests)
    assert state.table.num_pages[rows(requests)].tolist() == [2, 1, 3]
    audit(state)


def test_cached_prefixes_give_way_before_anybody_is_retracted() -> None:
    state = make_state(pages=4)
    (ended,) = decoding(state, 8)
    state.finish(ended, FinishReason.LENGTH)
    assert state.memory.pages_cached == 2
    requests = decoding(state, 4, 4)
    assert DecodePlanner(state).plan(8).rows.tolist() == rows(requests)
    assert not state.retractions
    audit(state)


@pytest.mark.parametrize("arriving", [1, 2, 3])
def test_no_more_are_retracted_than_pages_are_missing(arriving: int) -> None:  # C44
    """Three need a page, none is free, some are behind a fence: only the rest is taken away."""
    state = make_state(rows=8, pages=3 + arriving, prefix_cache=False)
    requests = decoding(state, 4, 4, 4)
    (leaver,) = decoding(state, 4 * arriving, landed=False)
    state.finish(leaver, FinishReason.ABORT)
    assert (state.memory.pool.free, state.memory.pool.arriving) == (0, arriving)
    planned = DecodePlanner(state).plan(8).rows.tolist()
    # One that is retracted brings a page and needs none any more.
    expected = {1: [rows(requests[:1]), 1], 2: [[], 1], 3: [[], 0]}[arriving]
    victims = [request for request in requests if request.state is State.QUEUED]
    assert len(victims) == state.retractions == expected[1]
    assert victims == requests[3 - len(victims) :]
    assert all(row in rows(requests) for row in planned)
    for _ in range(2):  # what arrives is for those that waited
        state.memory.advance(state.step)
        planned = DecodePlanner(state).plan(8).rows.tolist()
    assert planned == [request.row for request in requests if request.state is State.DECODE]
    audit(state)


def test_nobody_is_retracted_for_pages_that_a_retiring_request_brings() -> None:
    state = make_state(pages=4, prefix_cache=False)
    requests, (retiring,) = decoding(state, 4, 4), decoding(state, 8, landed=False)
    state.retire(retiring)
    assert DecodePlanner(state).plan(8).rows.tolist() == []
    assert not state.retractions
    land(state, state.step, retiring)
    state.finish(retiring, FinishReason.LENGTH)
    assert DecodePlanner(state).plan(8).rows.tolist() == rows(requests)
    audit(state)


def test_the_paused_are_the_first_victims() -> None:
    state = make_state(pages=3, prefix_cache=False)
    paused, first, second = decoding(state, 4, 4, 3)
    state.pause(paused)
    assert DecodePlanner(state).plan(8).rows.tolist() == [first.row, second.row]
    assert paused.state is State.PARKED
    audit(state)


def test_the_last_one_waits_for_its_tokens_in_flight_then_fails_alone() -> None:  # C43
    state = make_state(pages=2, prefix_cache=False)
    (request,) = decoding(state, 8, landed=False)
    assert DecodePlanner(state).plan(8).rows.tolist() == []
    assert not request.finished
    land(state, state.step, request)
    assert DecodePlanner(state).plan(8).rows.tolist() == []
    assert request.finish_reason is FinishReason.ERROR
    assert isinstance(request.error, KVCacheExhausted)
    assert (request.error.tokens, request.error.capacity) == (9, 8)
    assert state.memory.pool.free == 2
    audit(state)


def test_the_first_of_the_highest_priority_is_never_a_victim() -> None:
    state = make_state(rows=8, pages=4, prefix_cache=False)
    requests = [make_request(4, 64, priority=priority) for priority in (0, 3, 3, 1)]
    for request in requests:
        admit(state, request)
    land(state, run_step(state, *requests), *requests)
    planner = DecodePlanner(state)
    assert planner.plan(8).rows.tolist() == [requests[1].row, requests[2].row]
    assert [request.state for request in requests] == [
        State.QUEUED,
        State.DECODE,
        State.DECODE,
        State.QUEUED,
    ]
    audit(state)
