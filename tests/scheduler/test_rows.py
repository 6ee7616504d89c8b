"""RowTable: who has which row, and since when."""

from __future__ import annotations

import random

import numpy as np
from engines import greedy
from scheduler_parts import make_request

from aiosched.scheduler.requests import Request
from aiosched.scheduler.rows import RowTable


def test_rows_have_one_owner_and_a_new_generation_for_each() -> None:  # C03
    """10,000 random operations on 8 rows: admit, next chunk or token, release, step done."""
    draw, table, step, completed = random.Random(3), RowTable(8, 4), 0, 0
    owners: dict[int, Request] = {}
    generations: dict[int, int] = {}
    last_used: dict[int, int] = {}
    for _ in range(10_000):
        match draw.choice(["admit", "run", "run", "leave", "done"]):
            case "admit" if table.free:
                request = make_request(2, 3)
                row = table.acquire(request)
                assert row != 0 and row not in owners
                assert last_used.get(row, 0) <= completed
                assert table.generation[row] > generations.get(row, 0)
                owners[row], generations[row] = request, int(table.generation[row])
            case "run" if owners:
                step += 1
                row = draw.choice(list(owners))
                table.last_step[row] = last_used[row] = step
            case "leave" if owners:
                row = draw.choice(list(owners))
                request = owners.pop(row)
                table.release(request)
                assert request.row == 0
            case "done" if completed < step:
                completed += 1
                table.advance(completed)
        for row, request in owners.items():
            assert table.owner[row] is request and request.row == row
            assert table.generation[row] == generations[row]
        assert sum(owner is not None for owner in table.owner) == len(owners)
        assert table.free + table.arriving + len(owners) == 8


def test_a_row_is_free_again_only_behind_the_last_step_that_used_it() -> None:
    table, request = RowTable(1, 4), make_request()
    row = table.acquire(request)
    table.last_step[row] = 7
    table.release(request)
    assert (table.free, table.arriving) == (0, 1)
    table.advance(6)
    assert (table.free, table.arriving) == (0, 1)
    table.advance(7)
    assert (table.free, table.arriving) == (1, 0)


def test_a_row_that_no_step_in_flight_uses_is_free_at_once() -> None:
    table, request = RowTable(1, 4), make_request()
    table.last_step[table.acquire(request)] = 7
    table.advance(7)
    table.release(request)
    assert (table.free, table.arriving) == (1, 0)


def test_a_new_owner_finds_nothing_of_the_old_one() -> None:
    table = RowTable(1, 8)
    old = make_request(
        9, params=greedy(8, stop_token_ids=[1], frequency_penalty=1.0, logprobs=2, seed=5)
    )
    row = table.acquire(old)
    table.page_table[row, :5] = [9, 8, 7, 6, 5]
    table.num_pages[row], table.num_shared[row], table.kv_len[row] = 5, 2, 9
    table.out_len[row] = 3
    table.release(old)
    new = make_request(2, 4)
    assert table.acquire(new) == row
    assert not table.page_table[row].any()
    columns = (table.num_pages, table.num_shared, table.kv_len, table.kv_done, table.out_len)
    assert [int(column[row]) for column in columns] == [0, 0, 0, 0, 0]
    assert not table.watched[row] and not table.special[row] and table.plain[row]
    assert table.kv_limit[row] == 2 + 4 - 1
    assert table.frequency[row] == 0.0


def test_current_tells_owners_from_their_successors() -> None:
    table = RowTable(2, 4)
    first, second = make_request(), make_request()
    rows = np.array([table.acquire(first), table.acquire(second)])
    generations = table.generation[rows]
    assert table.current(rows, generations).tolist() == [True, True]
    table.release(first)
    assert table.current(rows, generations).tolist() == [False, True]
    table.acquire(make_request())
    assert table.current(rows, generations).tolist() == [False, True]
