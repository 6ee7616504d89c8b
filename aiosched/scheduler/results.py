"""process_batch_result: commit a step's tokens, apply stop rules, finish requests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from aiosched.errors import InvalidModelOutput
from aiosched.model.inputs import StepResult
from aiosched.request import FinishReason
from aiosched.scheduler.batch import ScheduleBatch
from aiosched.scheduler.cohort import Cohort
from aiosched.scheduler.reader import Reader, wake
from aiosched.scheduler.requests import Request
from aiosched.scheduler.state import SchedulerState


class ResultProcessor:
    """Applies results, in the order of their steps, to the requests that they are still for."""

    def __init__(
        self, state: SchedulerState, vocab_size: int, eos_token_ids: tuple[int, ...]
    ) -> None:
        self._state = state
        self._vocab_size = vocab_size
        self._is_eos = np.zeros(vocab_size, dtype=np.bool_)
        self._is_eos[[t for t in eos_token_ids if t < vocab_size]] = True

    def process_batch_result(self, batch: ScheduleBatch, result: StepResult) -> None:
        """Commit what ``batch`` computed.

        A result applies to a request only if the row is still its own, with the generation that the
        step ran under: whoever finished, was aborted or was retracted since gets nothing. Runs in
        one piece: readers are woken here, and run when the event loop gets to them.
        """
        state, table = self._state, self._state.table
        state.completed = batch.step
        state.memory.advance(batch.step)
        inputs = batch.inputs
        if batch.releases == table.releases:
            current = None  # all of them
            table.kv_done[inputs.rows] = inputs.seq_lens
        else:
            current = table.current(inputs.rows, inputs.generations)
            table.kv_done[inputs.rows[current]] = inputs.seq_lens[current]
        if batch.mode.is_extend:
            self._commit_prompts(batch, result, current)
        self._commit_tokens(batch, result)

    def _commit_prompts(
        self, batch: ScheduleBatch, result: StepResult, current: NDArray[np.bool_] | None
    ) -> None:
        """Share the pages that chunks have filled, and keep prompt log-probabilities."""
        if current is None:
            current = np.ones(len(batch.requests), dtype=np.bool_)
        for index in range(batch.inputs.num_decodes, len(batch.requests)):
            request = batch.requests[index]
            if current[index]:
                self._state.memory.share(request)
                family, done = request.family, self._state.table.kv_done[request.row]
                if not family.prompt_ready and done >= len(request.prompt):
                    family.prompt_ready = True
                    self._state.release_family(family)
        asked, values = batch.inputs.prompt_logprobs, result.prompt_logprobs
        if asked is None or values is None:
            return
        places = batch.inputs.positions[asked.logits_index]
        # Sequences stand in order, and so do the positions of each: one run of rows a sequence.
        sequences, starts = np.unique(asked.sequence, return_index=True)
        stops = [*starts[1:].tolist(), len(places)]
        for sequence, start, stop in zip(sequences.tolist(), starts.tolist(), stops, strict=True):
            kept = batch.requests[sequence].prompt_logprobs
            if not current[sequence] or kept is None:
                continue
            # After a retraction the prompt is read in again: each position is kept once.
            new = start + max(0, len(kept) - int(places[start]))
            if new < stop and len(kept) == places[new]:
                kept.extend(asked.targets[new:stop], values, new, stop)

    def _commit_tokens(self, batch: ScheduleBatch, result: StepResult) -> None:
        # Here and in the planner, counting stands for any() and all(), which take four times as
        # long on arrays of this size.
        table, cohort, tokens = self._state.table, batch.sampled, result.tokens
        places = None  # of the requests in the step's sampled ones, if some have gone
        if batch.releases != table.releases:
            current = table.current(cohort.rows, cohort.generations)
            if not current.all():
                places = np.flatnonzero(current)
                tokens = tokens[places]
                cohort = Cohort.of([cohort.requests[i] for i in places.tolist()], table)
        rows = cohort.rows
        out_len = table.out_len[rows] + 1
        table.out_len[rows] = out_len
        # One comparison for both ends: as unsigned numbers, negative tokens are large.
        valid = tokens.view(np.uint64) < self._vocab_size
        by_hand = out_len >= table.look_at[rows]
        by_hand |= table.watched[rows]
        if np.count_nonzero(valid) == len(valid):
            by_hand |= self._is_eos[tokens] & table.stops_at_eos[rows]
        else:
            by_hand |= ~valid
            by_hand |= self._is_eos[np.where(valid, tokens, 0)] & table.stops_at_eos[rows]
        for users, stop_ids in zip(table.with_stop_ids, table.stop_ids, strict=True):
            if not users:
                break
            by_hand |= stop_ids[rows] == tokens
        if not np.count_nonzero(by_hand):
            _deliver(cohort.outputs, cohort.readers, tokens.tolist())
            return
        plain = np.flatnonzero(~by_hand).tolist()
        _deliver(
            [cohort.outputs[i] for i in plain],
            [cohort.readers[i] for i in plain],
            tokens[plain].tolist(),
        )
        logprobs = _by_sample(batch, result)
        for i in np.flatnonzero(by_hand).tolist():
            place = i if places is None else int(places[i])
            self._commit_one(
                cohort.requests[i], int(tokens[i]), batch.step, logprobs.get(place), result
            )

    def _commit_one(
        self,
        request: Request,
        token: int,
        step: int,
        logprob_row: int | None,
        result: StepResult,
    ) -> None:
        """Commit the token of a request that ends, or that wants more than tokens."""
        if not 0 <= token < self._vocab_size:
            error = InvalidModelOutput(request.id, step, request.length, token)
            self._state.finish(request, FinishReason.ERROR, error)
            return
        request.output.append(token)
        count = len(request.output)
        if request.logprobs is not None and logprob_row is not None and result.logprobs is not None:
            request.logprobs.append(token, result.logprobs, logprob_row)
        reason = None
        if token in request.stop_ids:
            reason = FinishReason.STOP
        if request.texts is not None and request.text_pipe is not None:
            shown = ""
            if reason is None or request.params.include_stop:
                shown, found = request.text_pipe.push(token)
                if found:
                    reason = FinishReason.STOP
            request.texts.append(shown)
        if reason is None and count >= request.max_new:
            reason = FinishReason.LENGTH
        if reason is not None:
            self._state.finish(request, reason)
            return
        unread = count - request.read
        if count == 1 or unread >= min(request.interval, request.unread_limit):
            request.reader.token()
        if unread >= request.unread_limit:
            self._state.pause(request)
        self._state.table.look_at[request.row] = request.next_look()


def _deliver(
    outputs: Sequence[list[int]], readers: Sequence[Reader], tokens: Sequence[int]
) -> None:
    """The common case of commit, once for each row of each step: append, and wake who waits."""
    # Without a line of Python for each row: `append` returns None, so `any` calls it for all.
    any(map(list.append, outputs, tokens))
    wake(readers)


def _by_sample(batch: ScheduleBatch, result: StepResult) -> dict[int, int]:
    """Sampled sequence → its row in ``result.logprobs``."""
    index = batch.inputs.sampling.logprob_index
    if index is None or result.logprobs is None:
        return {}
    return {int(sample): row for row, sample in enumerate(index)}
