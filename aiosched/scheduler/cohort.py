"""Cohort: the requests of a step, and all of them that does not change from step to step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from aiosched.scheduler.reader import Reader
from aiosched.scheduler.requests import Request
from aiosched.scheduler.rows import RowTable


@dataclass(frozen=True, slots=True, eq=False)
class Cohort:
    """``n`` requests in the order of their step. Arrays are read-only: steps in flight share them.

    While nobody joins or leaves, every step has the same cohort, and what is looked up here once
    (rows, generations, whom to tell) costs those steps nothing.

    Attributes:
        outputs, readers: of each request: where its token goes, and who may wait for it.
        index: 0 … n - 1.
        offsets: 0 … n.
        greedy: each takes its most likely token, and nothing touches the logits.
    """

    requests: tuple[Request, ...]
    rows: NDArray[np.int64]  # [n]
    generations: NDArray[np.int64]  # [n]
    outputs: tuple[list[int], ...]  # [n]
    readers: tuple[Reader, ...]  # [n]
    index: NDArray[np.int64]  # [n]
    offsets: NDArray[np.int32]  # [n + 1]
    greedy: bool

    @classmethod
    def of(cls, requests: Sequence[Request], table: RowTable) -> Cohort:
        """``requests``, each of which holds a row of ``table``."""
        count = len(requests)
        rows = np.fromiter((r.row for r in requests), dtype=np.int64, count=count)
        generations = table.generation[rows]
        index = np.arange(count)
        offsets = np.arange(count + 1, dtype=np.int32)
        for array in (rows, generations, index, offsets):
            array.flags.writeable = False
        return cls(
            requests=tuple(requests),
            rows=rows,
            generations=generations,
            outputs=tuple([r.output for r in requests]),
            readers=tuple([r.reader for r in requests]),
            index=index,
            offsets=offsets,
            greedy=bool(table.plain[rows].all()),
        )

    def __len__(self) -> int:
        return len(self.requests)
