"""LogprobRows: a request's log-probabilities as they came from the device."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import overload

from aiosched.model.inputs import IntArray, Logprobs
from aiosched.request import Logprob


class LogprobRows(Sequence[Logprob]):
    """One ``Logprob`` for each token, made when it is read and not in the scheduler's step.

    Rows are copied out of the step's arrays: one request must not keep alive what its neighbours
    got. They are kept as float32, as they came.

    Args:
        num_top: the alternatives that the request asked for.
    """

    __slots__ = ("_chosen", "_num_top", "_tokens", "_top", "_top_ids", "_width")

    def __init__(self, num_top: int) -> None:
        self._num_top = num_top
        self._width = 0  # alternatives per row: fewer if the vocabulary is smaller
        self._tokens = array("q")  # [rows]
        self._chosen = array("f")  # [rows]
        self._top_ids = array("i")  # [rows * width]
        self._top = array("f")  # [rows * width]

    def append(self, token: int, values: Logprobs, row: int) -> None:
        """Keep one row of a step: that of ``token``."""
        self._tokens.append(token)
        self._chosen.append(values.chosen[row])
        self._keep(values, row, row + 1)

    def extend(self, tokens: IntArray, values: Logprobs, start: int, stop: int) -> None:
        """Keep the rows ``start`` to ``stop`` of a step: those of ``tokens`` int64 ``[rows]``."""
        self._tokens.frombytes(tokens.tobytes())
        self._chosen.frombytes(values.chosen[start:stop].tobytes())
        self._keep(values, start, stop)

    def _keep(self, values: Logprobs, start: int, stop: int) -> None:
        self._width = width = min(self._num_top, values.top.shape[1])
        if width:
            self._top_ids.frombytes(values.top_ids[start:stop, :width].tobytes())
            self._top.frombytes(values.top[start:stop, :width].tobytes())

    def __len__(self) -> int:
        return len(self._tokens)

    @overload
    def __getitem__(self, index: int) -> Logprob: ...
    @overload
    def __getitem__(self, index: slice) -> list[Logprob]: ...
    def __getitem__(self, index: int | slice) -> Logprob | list[Logprob]:
        if isinstance(index, slice):
            return [self._row(i) for i in range(*index.indices(len(self)))]
        return self._row(range(len(self))[index])

    def __iter__(self) -> Iterator[Logprob]:
        return map(self._row, range(len(self)))

    def _row(self, index: int) -> Logprob:
        start, stop = index * self._width, (index + 1) * self._width
        top = dict(zip(self._top_ids[start:stop], self._top[start:stop], strict=True))
        return Logprob(token_id=self._tokens[index], logprob=self._chosen[index], top=top)
