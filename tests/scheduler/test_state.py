"""SchedulerState: the moves of a request, and who is to go first when pages run out."""

from __future__ import annotations

import asyncio

import pytest
from kv_audit import audit
from scheduler_parts import admit, land, make_request, make_state, run_step

from aiosched.request import FinishReason
from aiosched.scheduler.reader import Reader
from aiosched.scheduler.requests import Request, State
from aiosched.scheduler.state import SchedulerState


def decoding(state: SchedulerState, **fields: object) -> Request:
    request = make_request(4, **fields)  # type: ignore[arg-type]
    admit(state, request)
    run_step(state, request)
    return request


def in_state(state: SchedulerState, wanted: State) -> Request:
    """A request that has come to ``wanted`` by the moves there are."""
    if wanted is State.QUEUED:
        request = make_request(4)
        state.push(request)
        return request
    if wanted is State.PREFILL:
        request = make_request(4)
        admit(state, request)
        return request
    request = decoding(state)
    match wanted:
        case State.RETIRING:
            state.retire(request)
        case State.PAUSED:
            state.pause(request)
        case State.RESUMING:
            state.pause(request)
            state.resume(request)
        case State.PARKED:
            state.pause(request)
            state.retract(request)
    assert request.state is wanted
    return request


UNFINISHED = [place for place in State if place is not State.FINISHED]


@pytest.mark.parametrize("place", UNFINISHED)
def test_a_request_may_end_anywhere_and_leaves_nothing(place: State) -> None:
    state = make_state()
    request, neighbour = in_state(state, place), decoding(state)
    audit(state)
    state.finish(request, FinishReason.ABORT)
    audit(state)
    state.finish(neighbour, FinishReason.LENGTH)
    state.memory.advance(state.step)
    audit(state)
    assert not state.live and not state.waiting
    assert state.table.free == state.table.count
    assert state.memory.pool.free + state.memory.pages_cached == state.memory.pool.total


@pytest.mark.parametrize("place", UNFINISHED)
def test_a_second_end_changes_nothing(place: State) -> None:  # C34
    state = make_state()
    request = in_state(state, place)
    state.finish(request, FinishReason.STOP)
    free, row_count = state.memory.pool.free, state.table.free
    state.finish(request, FinishReason.ABORT, RuntimeError())
    assert request.finish_reason is FinishReason.STOP and request.error is None
    assert dict(state.finished) == {FinishReason.STOP: 1}
    assert (state.memory.pool.free, state.table.free) == (free, row_count)
    audit(state)


@pytest.mark.parametrize("place", [State.PREFILL, State.DECODE, State.PAUSED, State.RESUMING])
def test_a_retracted_request_holds_nothing(place: State) -> None:
    state = make_state()
    request = in_state(state, place)
    generation = int(state.table.generation[row := request.row])
    request.tracked_row = row
    state.retract(request)
    assert request.tracked_row == 0  # in the same row again, its counts are loaded again
    state.memory.advance(state.step)
    assert request.row == 0 and request.node is None
    assert request.state is (State.PARKED if place is State.PAUSED else State.QUEUED)
    assert state.table.generation[row] == generation + 1  # results in flight are void
    assert state.table.free == state.table.count
    audit(state)


def test_a_pause_and_a_return_before_the_next_plan_list_nobody_twice() -> None:
    state = make_state()
    request, other = decoding(state), decoding(state)
    assert len(state.running) == 2
    state.pause(request)
    state.resume(request)
    state.fill_places(8)
    assert state.running.turn(8).rows.tolist() == [other.row, request.row]
    state.pause(other)
    state.resume(other)
    state.fill_places(8)
    state.pause(other)
    assert state.running.turn(8).rows.tolist() == [request.row]
    audit(state)


def test_those_whose_readers_read_again_wait_for_places_in_order() -> None:
    state = make_state()
    first, second, runs = (decoding(state) for _ in range(3))
    for request in (second, first):
        state.pause(request)
        state.resume(request)
    state.fill_places(1)
    assert (first.state, second.state) == (State.RESUMING, State.RESUMING)
    state.fill_places(2)
    assert (first.state, second.state) == (State.DECODE, State.RESUMING)
    state.pause(second)  # tokens that were in flight have filled it up again
    state.finish(runs, FinishReason.ABORT)
    state.fill_places(2)
    assert second.state is State.PAUSED
    audit(state)


def test_a_parked_request_waits_for_its_reader_then_for_a_place() -> None:
    state = make_state()
    request = in_state(state, State.PARKED)
    assert state.waiting.pop() is None
    state.resume(request)
    assert request.state is State.QUEUED and list(state.waiting) == [request]
    state.resume(request)
    assert state.waiting.pop() is request


def test_only_whoever_decodes_is_paused() -> None:
    state = make_state()
    for place in (State.RETIRING, State.PREFILL, State.QUEUED):
        request = in_state(state, place)
        state.pause(request)
        assert request.state is place


def test_victims_are_paused_ones_then_low_priority_then_late_arrival() -> None:  # C57
    state = make_state(rows=8)
    first, second = decoding(state), decoding(state)
    high, paused = decoding(state, priority=5), decoding(state, priority=9)
    prefilling = make_request(4)
    admit(state, prefilling)
    state.pause(paused)
    assert list(state.victims()) == [paused, prefilling, second, first, high]


def test_rows_take_turns_if_not_all_may_run() -> None:  # C54
    state = make_state(rows=8)
    for _ in range(5):
        decoding(state)
    turns = [state.running.turn(2).rows.tolist() for _ in range(5)]
    assert sorted(row for turn in turns for row in turn) == sorted([1, 2, 3, 4, 5] * 2)
    assert all(len(set(turn)) == 2 for turn in turns)
    assert state.running.turn(5).rows.tolist() == [1, 2, 3, 4, 5]


def test_deadlines_are_named_once_and_forgotten_with_their_requests() -> None:
    state = make_state(rows=8)
    soon, late, done = (make_request(1, deadline_at=at) for at in (1.0, 3.0, 2.0))
    for request in (soon, late, done):
        state.push(request)
    assert state.next_deadline == 1.0
    state.finish(done, FinishReason.ABORT)
    assert state.expired(0.5) == []
    assert state.expired(2.5) == [soon]
    assert state.expired(2.5) == []
    state.finish(soon, FinishReason.DEADLINE)
    assert state.next_deadline == 3.0
    state.finish(late, FinishReason.ABORT)
    assert state.next_deadline is None and not state._deadlines


def test_headroom_follows_what_retractions_teach() -> None:
    state = make_state(pages=64)
    request = decoding(state, max_new=33)
    assert state.table.kv_limit[request.row] - state.table.kv_len[request.row] == 32
    assert state.headroom(state.running_growth()) == 32 * 0.5 / 4
    victim = decoding(state)
    state.retract(victim)
    assert state.headroom(state.running_growth()) == 32 / 4
    for _ in range(10_000):
        state.decay()
    assert state.headroom(state.running_growth()) == -(-int(32 * 0.1) // 4)


def test_whoever_waits_for_the_end_of_all_is_told() -> None:
    async def main() -> None:
        state = make_state()
        requests = [decoding(state), decoding(state)]
        emptied = asyncio.get_running_loop().create_future()
        state.on_empty.append(emptied)
        state.finish(requests[0], FinishReason.STOP)
        assert not emptied.done()
        state.finish(requests[1], FinishReason.STOP)
        assert emptied.done() and not state.on_empty

    asyncio.run(main())


def test_row_and_pages_are_back_when_the_reader_is_told() -> None:
    state, seen = make_state(), []

    class Told(Reader):
        def notify(self) -> None:
            seen.append((state.table.free, state.memory.pool.held))

    request = decoding(state, reader=Told())
    land(state, state.step, request)
    state.finish(request, FinishReason.STOP)
    assert seen == [(state.table.count, state.memory.pages_cached)]
