"""From the columns of the batch's rows to the ``SamplingInputs`` of its step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from aiosched.model.draws import uniform_draws
from aiosched.model.inputs import SamplingInputs, TrackedReset
from aiosched.scheduler.cohort import Cohort
from aiosched.scheduler.requests import Request
from aiosched.scheduler.rows import RowTable

Scalar = TypeVar("Scalar", np.float32, np.int32)

GREEDY = SamplingInputs()
"""Every row takes its most likely token, and nothing touches the logits."""


def sampling_inputs(
    table: RowTable, cohort: Cohort, eos_token_ids: Sequence[int]
) -> SamplingInputs:
    """Sampling of ``cohort``, whose step samples the token at position ``kv_len`` of each.

    The draw of a row is a function of its seed and that position, so neither its neighbours nor
    the depth of the overlap nor a retraction changes it.
    """
    if cohort.greedy:
        return GREEDY
    rows, requests = cohort.rows, cohort.requests
    temperature = table.temperature[rows]
    sampled = bool(temperature.any())
    special = np.flatnonzero(table.special[rows])
    penalised = len(special) > 0
    rep, pres, freq = (c[rows] for c in (table.repetition, table.presence, table.frequency))
    extra = _Special(table, rows, requests, special, eos_token_ids)
    return SamplingInputs(
        temperature=temperature if sampled else None,
        top_k=_unless_all(table.top_k[rows], 0) if sampled else None,
        top_p=_unless_all(table.top_p[rows], 1.0) if sampled else None,
        min_p=_unless_all(table.min_p[rows], 0.0) if sampled else None,
        uniform=uniform_draws(table.seed[rows], table.kv_len[rows]) if sampled else None,
        repetition=_unless_all(rep, 1.0) if penalised else None,
        presence=_unless_all(pres, 0.0) if penalised else None,
        frequency=_unless_all(freq, 0.0) if penalised else None,
        resets=tuple(extra.resets),
        tracked=_ids(extra.tracked),
        bias_index=_ids(extra.bias_index),
        bias_ids=_ids(extra.bias_ids),
        bias_values=np.array(extra.bias_values, dtype=np.float32) if extra.bias_ids else None,
        allowed=tuple(extra.allowed),
        bad_words=tuple(extra.bad_words),
        logprob_index=_ids(extra.logprobs),
        num_top=extra.num_top,
    )


class _Special:
    """What concerns single rows: gathered in Python, for the rows that have it."""

    def __init__(
        self,
        table: RowTable,
        rows: NDArray[np.int64],
        requests: Sequence[Request],
        special: NDArray[np.intp],
        eos_token_ids: Sequence[int],
    ) -> None:
        self.resets: list[TrackedReset] = []
        self.tracked: list[int] = []
        self.bias_index: list[int] = []
        self.bias_ids: list[int] = []
        self.bias_values: list[float] = []
        self.allowed: list[tuple[int, NDArray[np.int64]]] = []
        self.bad_words: list[tuple[int, tuple[tuple[int, ...], ...]]] = []
        self.logprobs: list[int] = []
        self.num_top = 0
        for index in special.tolist():
            request, row = requests[index], int(rows[index])
            params = request.params
            if request.tracked:
                self.tracked.append(index)
                if request.tracked_row != row:
                    request.tracked_row = row
                    output = np.array(request.output, dtype=np.int32)
                    self.resets.append(TrackedReset(row, request.prompt, output))
            self._bias(index, request.bias_ids, request.bias_values)
            if params.min_tokens:
                # The index of the token that this step samples, results still pending included.
                position = int(table.kv_len[row]) - len(request.prompt)
                if position < params.min_tokens:
                    ends = {*eos_token_ids, *request.stop_ids}
                    self._bias(index, sorted(ends), [-np.inf] * len(ends))
            if request.allowed is not None:
                self.allowed.append((index, request.allowed))
            if request.bad_words:
                self.bad_words.append((index, request.bad_words))
            if params.logprobs is not None:
                self.logprobs.append(index)
                self.num_top = max(self.num_top, params.logprobs)

    def _bias(self, index: int, ids: Sequence[int], values: Sequence[float]) -> None:
        self.bias_index.extend([index] * len(ids))
        self.bias_ids.extend(ids)
        self.bias_values.extend(values)


def _unless_all(column: NDArray[Scalar], off: float) -> NDArray[Scalar] | None:
    return None if (column == off).all() else column


def _ids(values: Sequence[int]) -> NDArray[np.int64] | None:
    return np.array(values, dtype=np.int64) if values else None
