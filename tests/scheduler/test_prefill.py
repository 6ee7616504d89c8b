"""PrefillPlanner: admission in order, chunks within a budget."""

from __future__ import annotations

import pytest
from engines import greedy, prompt
from kv_audit import audit
from scheduler_parts import admit, land, make_request, make_state, run_step

from aiosched.errors import KVCacheExhausted
from aiosched.request import FinishReason
from aiosched.scheduler.prefill import Chunk, PrefillPlanner
from aiosched.scheduler.requests import Family, Request, State
from aiosched.scheduler.state import SchedulerState


def wait(state: SchedulerState, *sizes: int, **fields: object) -> list[Request]:
    requests = [make_request(size, **fields) for size in sizes]  # type: ignore[arg-type]
    for request in requests:
        state.push(request)
    return requests


def launch(state: SchedulerState, chunks: list[Chunk]) -> int:
    """What launching the chunks means for lengths."""
    state.step += 1
    for chunk in chunks:
        state.table.kv_len[chunk.request.row] = chunk.end
        state.table.last_step[chunk.request.row] = state.step
        if chunk.is_last:
            state.begin_decode(chunk.request)
    return state.step


def cut(chunks: list[Chunk]) -> list[tuple[Request, int, int]]:
    return [(chunk.request, chunk.start, chunk.end) for chunk in chunks]


def test_a_budget_is_filled_by_prompts_in_order_the_last_one_cut() -> None:
    state = make_state(pages=32)
    a, b, c = wait(state, 6, 20, 5)
    planner = PrefillPlanner(state, max_running=8)
    first = planner.plan(10)
    assert cut(first) == [(a, 0, 6), (b, 0, 4)]
    launch(state, first)
    second = planner.plan(10)
    assert cut(second) == [(b, 4, 14)]
    launch(state, second)
    assert cut(planner.plan(10)) == [(b, 14, 20), (c, 0, 4)]
    audit(state)


def test_without_budget_nobody_is_admitted() -> None:
    state = make_state()
    (request,) = wait(state, 3)
    assert PrefillPlanner(state, max_running=8).plan(0) == []
    assert request.state is State.QUEUED


def test_no_more_run_than_may() -> None:
    state = make_state(rows=8)
    wait(state, 2, 2, 2)
    planner = PrefillPlanner(state, max_running=2)
    chunks = planner.plan(100)
    assert len(chunks) == 2
    launch(state, chunks)
    assert planner.plan(100) == []
    state.retire(chunks[0].request)  # takes no place any more
    assert len(planner.plan(100)) == 1


def test_nobody_overtakes_the_first_for_being_small() -> None:
    state = make_state(pages=4, prefix_cache=False)
    admit(state, holder := make_request(8))
    run_step(state, holder)
    large, _ = wait(state, 12, 2)
    planner = PrefillPlanner(state, max_running=8)
    assert planner.plan(100) == []
    state.finish(holder, FinishReason.ABORT)
    state.memory.advance(state.step)
    assert cut(planner.plan(100)) == [(large, 0, 12)]


def test_paused_requests_give_way_to_one_that_waits() -> None:
    state = make_state(pages=4, prefix_cache=False)
    admit(state, paused := make_request(12))
    land(state, run_step(state, paused), paused)
    state.pause(paused)
    (newcomer,) = wait(state, 8)
    assert cut(PrefillPlanner(state, max_running=8).plan(100)) == [(newcomer, 0, 8)]
    assert paused.state is State.PARKED
    audit(state)


def test_one_that_outgrew_the_pool_while_it_waited_fails_and_the_next_is_served() -> None:
    state = make_state(pages=2)
    (grown, after) = wait(state, 8, 3)
    grown.output.append(1)  # a token came before it was retracted
    assert cut(PrefillPlanner(state, max_running=8).plan(100)) == [(after, 0, 3)]
    assert isinstance(grown.error, KVCacheExhausted)
    audit(state)


@pytest.mark.parametrize("ready", [False, True])
def test_a_family_waits_for_its_prompt_to_be_read_once(ready: bool) -> None:  # C71
    state, family, ids = make_state(rows=8), Family(), prompt(1, 9)
    siblings = [make_request(ids, family=family) for _ in range(3)]
    (stranger,) = [make_request(5)]
    for request in (*siblings, stranger):
        state.push(request)
    planner = PrefillPlanner(state, max_running=8)
    chunks = planner.plan(100)
    assert cut(chunks) == [(siblings[0], 0, 9), (stranger, 0, 5)]
    step = launch(state, chunks)
    land(state, step, siblings[0], stranger)
    state.memory.share(siblings[0])
    assert set(state.waiting) == set(siblings[1:])
    assert not state.waiting._heap  # no plan looks at them again
    if ready:
        family.prompt_ready = True
        state.release_family(family)
    later = [(sibling, 8, 9) for sibling in siblings[1:]] if ready else []
    assert cut(planner.plan(100)) == later
    audit(state)


@pytest.mark.parametrize("gone", range(3))
def test_a_family_whose_leader_ends_waits_for_it_no_longer(gone: int) -> None:
    state, family, ids = make_state(rows=8), Family(), prompt(1, 9)
    siblings = [make_request(ids, family=family) for _ in range(3)]
    for request in siblings:
        state.push(request)
    planner = PrefillPlanner(state, max_running=8)
    step = launch(state, planner.plan(4))
    assert planner.plan(0) == [] and len(planner.plan(100)) == 1
    state.finish(siblings[gone], FinishReason.DEADLINE)
    state.finish(siblings[0], FinishReason.ABORT)
    land(state, step)
    left = [sibling for sibling in siblings if not sibling.finished]
    assert [chunk.request for chunk in planner.plan(100)] == left
    audit(state)


def test_those_whose_readers_read_again_come_before_the_queue() -> None:
    state = make_state()
    admit(state, request := make_request(4))
    land(state, run_step(state, request), request)
    state.pause(request)
    state.resume(request)
    (newcomer,) = wait(state, 3)
    planner = PrefillPlanner(state, max_running=1)
    assert planner.plan(100) == []
    state.fill_places(1)
    assert planner.plan(100) == []
    state.finish(request, FinishReason.ABORT)
    assert cut(planner.plan(100)) == [(newcomer, 0, 3)]
    audit(state)


def test_what_was_cached_for_itself_does_not_count_as_cached() -> None:
    """``cached_tokens`` is what the prompt found at first, whatever retractions it met since."""
    state = make_state()
    (request,) = wait(state, 12, params=greedy(8))
    planner = PrefillPlanner(state, max_running=8)
    land(state, launch(state, planner.plan(8)))
    state.table.kv_done[request.row] = 8
    state.retract(request)
    chunks = planner.plan(8)
    assert cut(chunks) == [(request, 8, 12)]
    assert request.cached_tokens == 0
