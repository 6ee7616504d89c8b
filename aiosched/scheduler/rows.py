"""RowTable: the state of running requests as columns, one row each.

A request has the same row from admission to release (the field calls it ``req_pool_index``). The
steady state of decoding touches no Python object per request: lengths, page needs, stop tokens and
ends are one array operation each over the rows of the batch.
"""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

from aiosched.scheduler.requests import Request

STOP_IDS = 4
"""Stop tokens of a request that are compared as columns; with more, commit looks at each token."""
NO_TOKEN = 2**63 - 1


class RowTable:
    """``count`` rows for requests, and row 0, which is padding and belongs to nobody.

    Columns are indexed by row. ``generation`` grows each time a row is given up, so a result that
    was computed for an earlier owner (finished, aborted or retracted since) is known by its
    generation alone; it is the epoch of a request's stay in the row.

    ``kv_len`` counts positions whose KV a launched step writes; ``kv_done`` those that a finished
    step has written. Planning looks at the former only and so never needs a result.

    Attributes:
        releases: rows given up so far. While it stays the same, every owner is who it was.
    """

    def __init__(self, count: int, max_pages: int) -> None:
        size = count + 1
        self.count = count
        self.owner: list[Request | None] = [None] * size
        self.generation = np.ones(size, dtype=np.int64)
        self.last_step = np.zeros(size, dtype=np.int64)  # the fence: last step that uses the row
        self.kv_len = np.zeros(size, dtype=np.int64)
        self.kv_done = np.zeros(size, dtype=np.int64)
        self.kv_limit = np.zeros(size, dtype=np.int64)  # kv_len at which all tokens are launched
        self.num_pages = np.zeros(size, dtype=np.int64)
        self.num_shared = np.zeros(size, dtype=np.int64)  # leading pages that the radix cache owns
        self.page_table = np.zeros((size, max_pages), dtype=np.int32)
        self.out_len = np.zeros(size, dtype=np.int64)  # committed output tokens
        self.look_at = np.zeros(size, dtype=np.int64)  # out_len at which commit looks at the row
        self.stops_at_eos = np.zeros(size, dtype=np.bool_)  # the model's end tokens end it
        # Further tokens that do, the k-th of each row in a column of its own, and how many rows
        # have that many: most have one or none, so most columns need not be looked at.
        self.stop_ids = np.full((STOP_IDS, size), NO_TOKEN, dtype=np.int64)
        self.with_stop_ids = [0] * STOP_IDS
        self.watched = np.zeros(size, dtype=np.bool_)  # commit needs Python for each token
        self.plain = np.zeros(size, dtype=np.bool_)  # greedy, and nothing touches its logits
        self.temperature = np.zeros(size, dtype=np.float32)
        self.top_p = np.ones(size, dtype=np.float32)
        self.top_k = np.zeros(size, dtype=np.int32)
        self.min_p = np.zeros(size, dtype=np.float32)
        self.repetition = np.ones(size, dtype=np.float32)
        self.presence = np.zeros(size, dtype=np.float32)
        self.frequency = np.zeros(size, dtype=np.float32)
        self.seed = np.zeros(size, dtype=np.uint64)
        self.special = np.zeros(size, dtype=np.bool_)  # bias, bans, tracking or logprobs
        self.releases = 0
        self._free = list(range(count, 0, -1))
        self._arriving: deque[tuple[int, int]] = deque()
        self._completed = 0

    @property
    def free(self) -> int:
        """Rows that a request could have now."""
        return len(self._free)

    @property
    def arriving(self) -> int:
        """Rows that were given up and wait for their fence."""
        return len(self._arriving)

    def acquire(self, request: Request) -> int:
        """Give ``request`` a row and fill its columns. There must be a free one."""
        row = self._free.pop()
        params = request.params
        self.owner[row] = request
        request.row = row
        self.last_step[row] = 0
        self.kv_len[row] = self.kv_done[row] = 0
        self.kv_limit[row] = len(request.prompt) + request.max_new - 1
        self.num_pages[row] = self.num_shared[row] = 0
        self.out_len[row] = len(request.output)
        self.look_at[row] = request.next_look()
        self.stops_at_eos[row] = not params.ignore_eos
        few = len(params.stop_token_ids) <= STOP_IDS
        if few:
            for k, token in enumerate(params.stop_token_ids):
                self.stop_ids[k, row] = token
                self.with_stop_ids[k] += 1
        self.watched[row] = bool(
            not few
            or request.text_pipe is not None
            or request.logprobs is not None
            or request.interval > 1
        )
        self.temperature[row] = params.temperature
        self.top_p[row] = params.top_p
        self.top_k[row] = max(params.top_k, 0)
        self.min_p[row] = params.min_p
        self.repetition[row] = params.repetition_penalty
        self.presence[row] = params.presence_penalty
        self.frequency[row] = params.frequency_penalty
        self.seed[row] = request.seed
        self.special[row] = bool(
            request.tracked
            or request.bias_ids
            or request.allowed is not None
            or params.min_tokens
            or params.logprobs is not None
        )
        self.plain[row] = params.greedy and not self.special[row]
        return row

    def release(self, request: Request) -> None:
        """Take the row away; it is given out again once the last step that used it is done."""
        row, request.row = request.row, 0
        self.owner[row] = None
        self.generation[row] += 1
        self.releases += 1
        for k in range(STOP_IDS):
            if self.stop_ids[k, row] == NO_TOKEN:
                break
            self.stop_ids[k, row] = NO_TOKEN
            self.with_stop_ids[k] -= 1
        self.kv_len[row] = self.kv_done[row] = 0
        self.page_table[row, : self.num_pages[row]] = 0  # what lies behind a table is padding
        self.num_pages[row] = self.num_shared[row] = 0
        fence = int(self.last_step[row])
        if fence <= self._completed:
            self._free.append(row)
        else:
            self._arriving.append((fence, row))

    def advance(self, completed_step: int) -> None:
        """Steps up to this one are done: rows that waited for them are free."""
        self._completed = completed_step
        if self._arriving:
            waiting = [entry for entry in self._arriving if entry[0] > completed_step]
            self._free.extend(row for fence, row in self._arriving if fence <= completed_step)
            self._arriving = deque(waiting)

    def current(self, rows: NDArray[np.int64], generations: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of ``rows`` still belong to the owners of ``generations``."""
        same: NDArray[np.bool_] = self.generation[rows] == generations
        return same
