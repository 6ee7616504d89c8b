"""build_batch: from the rows and chunks that were picked to the arrays of one step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from aiosched.model.inputs import PromptLogprobInputs, StepInputs
from aiosched.scheduler.batch import ForwardMode, ScheduleBatch
from aiosched.scheduler.cohort import Cohort
from aiosched.scheduler.prefill import Chunk
from aiosched.scheduler.sampling import sampling_inputs
from aiosched.scheduler.state import SchedulerState


def build_batch(
    state: SchedulerState,
    decodes: Cohort,
    chunks: Sequence[Chunk],
    eos_token_ids: Sequence[int],
) -> ScheduleBatch:
    """The next step: ``decodes`` (one token each), then ``chunks``.

    Everything that changes is copied: the scheduler's own tables go on while the step is in flight.
    Rows are moved on (``kv_len``, ``last_step``), and requests that need no further step leave the
    batch here, by their lengths alone.
    """
    table, page_size = state.table, state.memory.page_size
    state.step += 1
    count = len(decodes)
    rows, requests = decodes.rows, decodes.requests
    positions = table.kv_len[rows]
    table.kv_len[rows] = seq_lens = positions + 1
    if not chunks:
        input_ids = np.zeros(count, dtype=np.int64)
        sequence, query_start = decodes.index, decodes.offsets
        samples, logits_index = decodes.index, decodes.index
        generations, sampled = decodes.generations, decodes
    else:
        requests += tuple(c.request for c in chunks)
        rows = np.concatenate([rows, [c.request.row for c in chunks]])
        ends = np.array([c.end for c in chunks])
        table.kv_len[rows[count:]] = ends
        seq_lens = np.concatenate([seq_lens, ends])
        query_lens = np.ones(len(rows), dtype=np.int64)
        query_lens[count:] = [c.end - c.start for c in chunks]
        positions = np.concatenate([positions, *(np.arange(c.start, c.end) for c in chunks)])
        prompts = [c.request.tokens(c.end)[c.start :] for c in chunks]
        input_ids = np.concatenate([np.zeros(count, dtype=np.int64), *prompts])
        sequence = np.repeat(np.arange(len(rows)), query_lens)
        query_start = np.zeros(len(rows) + 1, dtype=np.int32)
        np.cumsum(query_lens, out=query_start[1:])
        last = np.flatnonzero([c.is_last for c in chunks]) + count
        samples = np.concatenate([decodes.index, last])
        logits_index = query_start[1:][samples].astype(np.int64) - 1
        generations = table.generation[rows]
        sampled = Cohort.of([requests[i] for i in samples.tolist()], table)
    table.last_step[rows] = state.step

    most_pages = state.memory.pages_for(int(seq_lens.max()))
    page_tables = table.page_table[rows, :most_pages]
    nth_page = positions // page_size
    page = page_tables[sequence, nth_page].astype(np.int64)
    inputs = StepInputs(
        step=state.step,
        page_size=page_size,
        num_decodes=count,
        rows=rows,
        generations=generations,
        query_start=query_start,
        seq_lens=seq_lens.astype(np.int32),
        page_tables=page_tables,
        input_ids=input_ids,
        positions=positions,
        slots=(page - nth_page) * page_size + positions,
        logits_index=logits_index,
        sample_sequence=samples,
        sampling=sampling_inputs(table, sampled, eos_token_ids),
        prompt_logprobs=_prompt_logprobs(chunks, count),
    )
    batch = ScheduleBatch(
        inputs=inputs,
        mode=_mode(count, len(chunks)),
        requests=requests,
        sampled=sampled,
        releases=table.releases,
    )
    _move_on(state, decodes, chunks)
    return batch


def _mode(decodes: int, chunks: int) -> ForwardMode:
    if not chunks:
        return ForwardMode.DECODE
    return ForwardMode.MIXED if decodes else ForwardMode.EXTEND


def _move_on(
    state: SchedulerState,
    decodes: Cohort,
    chunks: Sequence[Chunk],
) -> None:
    """Requests whose last step this is leave the batch; those whose prompt is done decode next."""
    table = state.table
    over = table.kv_len[decodes.rows] >= table.kv_limit[decodes.rows]
    if np.count_nonzero(over):
        for index in np.flatnonzero(over).tolist():
            state.retire(decodes.requests[index])
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
    if not chunks:
        return None
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
