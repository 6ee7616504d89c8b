"""Parts of the scheduler for tests that do without an engine."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from engines import greedy, prompt

from aiosched.scheduler.memory import KVMemory
from aiosched.scheduler.reader import Reader
from aiosched.scheduler.requests import Family, Request
from aiosched.scheduler.rows import RowTable
from aiosched.scheduler.state import SchedulerState

_serial = itertools.count()


def make_request(tokens: list[int] | int = 4, max_new: int = 8, **fields: Any) -> Request:
    """A greedy request for these tokens, or for so many; the later made, the later arrived."""
    serial = next(_serial)
    ids = prompt(serial, tokens) if isinstance(tokens, int) else tokens
    defaults: dict[str, Any] = {
        "max_new": max_new,
        "seed": serial,
        "stop_ids": frozenset(),
        "reader": Reader(),
        "family": Family(),
        "key": (float(serial), serial),
    }
    params = fields.pop("params", greedy(max_new))
    return Request(f"r{serial}", np.array(ids, dtype=np.int32), params, **(defaults | fields))


def make_state(
    rows: int = 4, pages: int = 16, page_size: int = 4, prefix_cache: bool = True
) -> SchedulerState:
    table = RowTable(rows, pages + 1)
    memory = KVMemory(pages, page_size, table, prefix_cache=prefix_cache, check=True)
    return SchedulerState(table, memory)


def admit(state: SchedulerState, request: Request) -> None:
    """Bring a request from nowhere to PREFILL; there must be room."""
    state.push(request)
    state.waiting.remove(request)
    assert state.memory.admit(request, 0).name == "DONE"
    state.begin_prefill(request)


def run_step(state: SchedulerState, *requests: Request, decode: bool = True) -> int:
    """What launching a step means for lengths: prompts are read in whole, the others grow by one.

    Returns its number; ``land`` is what its result means.
    """
    state.step += 1
    for request in requests:
        row, table = request.row, state.table
        if request in state.prefilling:
            table.kv_len[row] = request.target
            if decode:
                state.begin_decode(request)
        else:
            table.kv_len[row] += 1
        table.last_step[row] = state.step
    return state.step


def land(state: SchedulerState, step: int, *requests: Request, token: int = 1) -> None:
    """The result of ``step`` is in: each of ``requests`` has got a token."""
    state.completed = step
    state.memory.advance(step)
    for request in requests:
        request.output.append(token)
        state.table.out_len[request.row] += 1
        state.table.kv_done[request.row] = request.length - 1
