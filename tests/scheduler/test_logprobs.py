"""LogprobRows: what was kept is what is read, and nothing else is kept alive."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from aiosched.model.inputs import Logprobs
from aiosched.request import Logprob
from aiosched.scheduler.logprobs import LogprobRows


def step(rows: int, width: int, seed: int = 0) -> Logprobs:
    """Values of one step, as the device hands them over."""
    draw = np.random.default_rng(seed)
    return Logprobs(
        chosen=-draw.random(rows, dtype=np.float32),
        top_ids=draw.integers(0, 1000, (rows, width), dtype=np.int32),
        top=-draw.random((rows, width), dtype=np.float32),
    )


def expected(token: int, values: Logprobs, row: int, count: int) -> Logprob:
    top = zip(values.top_ids[row, :count].tolist(), values.top[row, :count].tolist(), strict=True)
    return Logprob(token, float(values.chosen[row]), dict(top))


@pytest.mark.parametrize("num_top", [0, 1, 3, 5])
def test_rows_of_many_steps_read_as_they_came(num_top: int) -> None:
    kept, wanted = LogprobRows(num_top), []
    for i in range(4):
        values = step(rows=3, width=5, seed=i)  # a neighbour may have asked for more
        kept.append(i, values, i % 3)
        wanted.append(expected(i, values, i % 3, num_top))
    values = step(rows=6, width=5, seed=9)
    kept.extend(np.arange(10, 13), values, 2, 5)
    wanted += [expected(8 + row, values, row, num_top) for row in range(2, 5)]
    assert len(kept) == 7
    assert tuple(kept) == tuple(wanted)
    assert (kept[2], kept[-1], kept[1:3]) == (wanted[2], wanted[-1], wanted[1:3])
    with pytest.raises(IndexError):
        kept[7]


def test_a_small_vocabulary_has_fewer_alternatives() -> None:
    kept, values = LogprobRows(20), step(rows=2, width=4)
    for row in range(2):
        kept.append(row, values, row)
    assert list(kept) == [expected(row, values, row, 4) for row in range(2)]


def test_the_arrays_of_a_step_are_not_kept() -> None:
    kept, values = LogprobRows(2), step(rows=3, width=2)
    before = [sys.getrefcount(column) for column in (values.chosen, values.top_ids, values.top)]
    kept.append(1, values, 0)
    kept.extend(np.arange(2), values, 1, 3)
    after = [sys.getrefcount(column) for column in (values.chosen, values.top_ids, values.top)]
    assert before == after
