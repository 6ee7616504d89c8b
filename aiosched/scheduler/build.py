"""build_batch: from the rows and chunks that were picked to the arrays of one step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from aiosched.model.inputs import PromptLogprobInputs, StepInputs
from aiosched.scheduler.batch import ForwardMode, ScheduleBatch
from aiosched.scheduler.prefill import Chunk
from aiosched.scheduler.requests import Request
from aiosched.scheduler.sampling import sampling_inputs
from aiosched.scheduler.state import SchedulerState


def build_batch(
    state: SchedulerState,
    decodes: NDArray[np.int64],
    chunks: Sequence[Chunk],
    eos_token_ids: Sequence[int],
) -> ScheduleBatch:
    """The next step: ``decodes`` (rows, one token each), then ``chunks``.

    Everything is copied: the scheduler's own tables change while the step is in flight. Rows are
    moved on (``kv_len``, ``last_step``), and requests that need no further step leave the batch
    here, by their lengths alone.
    """
    table, page_size = state.table, state.memory.page_size
    state.step += 1
    rows, requests = decodes, _owners(state, decodes)
    positions = table.kv_len[decodes]
    table.kv_len[decodes] = seq_lens = positions + 1
    query_lens = np.ones(len(decodes), dtype=np.int64)
    input_ids = np.zeros(len(decodes), dtype=np.int64)
    samples = np.arange(len(decodes))
    if chunks:
        requests += tuple(c.request for c in chunks)
        rows = np.concatenate([decodes, [c.request.row for c in chunks]])
        ends = np.array([c.end for c in chunks])
        table.kv_len[rows[len(decodes) :]] = ends
        seq_lens = np.concatenate([seq_lens, ends])
        query_lens = np.concatenate([query_lens, [c.end - c.start for c in chunks]])
        positions = np.concatenate([positions, *(np.arange(c.start, c.end) for c in chunks)])
        prompts = [c.request.tokens(c.end)[c.start :] for c in chunks]
        input_ids = np.concatenate([input_ids, *prompts], dtype=np.int64)
        last = np.flatnonzero([c.is_last for c in chunks]) + len(decodes)
        samples = np.concatenate([samples, last])
    query_start = np.zeros(len(rows) + 1, dtype=np.int32)
    np.cumsum(query_lens, out=query_start[1:])
    table.last_step[rows] = state.step

    most_pages = state.memory.pages_for(int(seq_lens.max()))
    page_tables = table.page_table[rows, :most_pages]
    sequence = np.arange(len(rows)) if not chunks else np.repeat(np.arange(len(rows)), query_lens)
    page = page_tables[sequence, positions // page_size].astype(np.int64)
    rows_sampled = rows[samples]
    sampled = requests if len(samples) == len(requests) else tuple(requests[i] for i in samples)
    generations = table.generation[rows]
    inputs = StepInputs(
        step=state.step,
        page_size=page_size,
        num_decodes=len(decodes),
        rows=rows,
        generations=generations,
        query_start=query_start,
        seq_lens=seq_lens.astype(np.int32),
        page_tables=page_tables,
        input_ids=input_ids,
        positions=positions,
        slots=page * page_size + positions % page_size,
        logits_index=query_start[1:][samples].astype(np.int64) - 1,
        sample_sequence=samples,
        sampling=sampling_inputs(table, rows_sampled, sampled, eos_token_ids),
        prompt_logprobs=_prompt_logprobs(chunks, len(decodes)),
    )
    _move_on(state, decodes, requests, chunks)
    if not chunks:
        mode = ForwardMode.DECODE
    else:
        mode = ForwardMode.MIXED if len(decodes) else ForwardMode.EXTEND
    return ScheduleBatch(
        inputs=inputs,
        mode=mode,
        requests=requests,
        samples=samples,
        rows_sampled=rows_sampled,
        generations_sampled=generations[samples],
        requests_sampled=sampled,
    )


def _owners(state: SchedulerState, rows: NDArray[np.int64]) -> tuple[Request, ...]:
    if rows is state.running.rows:
        return state.running.requests
    owner = state.table.owner
    return tuple(r for r in (owner[row] for row in rows.tolist()) if r is not None)


def _move_on(
    state: SchedulerState,
    decodes: NDArray[np.int64],
    requests: Sequence[Request],
    chunks: Sequence[Chunk],
) -> None:
    """Requests whose last step this is leave the batch; those whose prompt is done decode next."""
    table = state.table
    for index in np.flatnonzero(table.kv_len[decodes] >= table.kv_limit[decodes]).tolist():
        state.retire(requests[index])
    for chunk in chunks:
        if not chunk.is_last:
            continue
        row = chunk.request.row
        if table.kv_len[row] >= table.kv_limit[row]:
            state.retire(chunk.request)
        else:
            state.begin_decode(chunk.request)


def _prompt_logprobs(chunks: Sequence[Chunk], offset: int) -> PromptLogprobInputs | None:
    """Positions of the chunks whose next prompt token's log-probability somebody wants.

    ``offset``: tokens, and sequences, of the step that stand before the chunks.
    """
    index, targets, sequence, num_top = [], [], [], 0
    tokens_before = offset
    for i, chunk in enumerate(chunks):
        request = chunk.request
        if request.prompt_logprobs is not None and request.params.prompt_logprobs is not None:
            end = min(chunk.end, len(request.prompt) - 1)  # the last has no prompt token after it
            places = np.arange(chunk.start, max(chunk.start, end))
            index.append(places - chunk.start + tokens_before)
            targets.append(request.prompt[places + 1].astype(np.int64))
            sequence.append(np.full(len(places), offset + i, dtype=np.int64))
            num_top = max(num_top, request.params.prompt_logprobs)
        tokens_before += chunk.end - chunk.start
    if not index or not sum(map(len, index)):
        return None
    return PromptLogprobInputs(
        logits_index=np.concatenate(index),
        targets=np.concatenate(targets),
        sequence=np.concatenate(sequence),
        num_top=num_top,
    )
