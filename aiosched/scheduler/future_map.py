"""FutureMap: the relay. Sampled tokens by row, on the device and as futures on the host.

On the device a step stashes what it sampled, and the next step on the same stream gathers it as
input, so no step waits for a token to visit the host. On the host ``arrival(step)`` is awaitable:
the step's result, once its copy has landed.

Each row carries the generation of the owner that wrote it. Two steps in flight can belong to two
owners of one row; the later owner may even have been written first (from the host, say), and a
late write of the earlier owner must not replace its token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiosched.device.stream import InFlight
from aiosched.model.inputs import StepResult
from aiosched.model.relay import RelayPayload, resolve_forward_inputs

if TYPE_CHECKING:
    import torch

__all__ = ["FutureMap", "RelayError", "RelayPayload", "resolve_forward_inputs"]

POISON = -1


class RelayError(RuntimeError):
    """A step read what was not written for it: a defect of the scheduler. Debug mode only.

    Attributes:
        row: the row that was read.
        expected: generation of the reader.
        found: generation of what lies there.
    """

    def __init__(self, row: int, expected: int, found: int) -> None:
        what = (
            "its value was consumed already, or never written"
            if expected == found
            else "it holds another owner's value"
        )
        super().__init__(
            f"relay row {row} read for generation {expected}, written by {found}: {what}"
        )
        self.row = row
        self.expected = expected
        self.found = found


class FutureMap:
    """Relay buffers for rows 0 … ``rows`` (row 0 is padding) and the results on their way.

    Args:
        rows: the largest row.
        device: where the buffers live, as torch names it.
        debug: every value must be read exactly once, by the generation that wrote it. Reads are
            checked at once, which waits for the device.
    """

    def __init__(self, rows: int, device: str = "cpu", debug: bool = False) -> None:
        import torch

        self._torch = torch
        self._debug = debug
        self._tokens = torch.full((rows + 1,), POISON, dtype=torch.int64, device=device)
        self._generations = torch.zeros(rows + 1, dtype=torch.int64, device=device)
        self._expected: dict[int, InFlight[StepResult]] = {}

    def gather(self, rows: torch.Tensor, generations: torch.Tensor) -> torch.Tensor:
        """Tokens int64 ``[k]`` last stashed for ``rows`` int64 ``[k]``. Device work.

        Raises:
            RelayError: in debug mode, for the first row whose value is of another generation than
                ``generations`` or was read before.
        """
        tokens = self._tokens.index_select(0, rows)
        if self._debug:
            self._check(rows, generations, tokens)
            self._tokens.index_fill_(0, rows, POISON)
        return tokens

    def stash(self, rows: torch.Tensor, generations: torch.Tensor, tokens: torch.Tensor) -> None:
        """Keep ``tokens`` int64 ``[k]``, no row twice. Device work.

        Where a newer generation has written, the row keeps what it has.
        """
        stored = self._generations.index_select(0, rows)
        current = generations >= stored
        kept = self._torch.where(current, tokens, self._tokens.index_select(0, rows))
        self._tokens.index_copy_(0, rows, kept)
        self._generations.index_copy_(0, rows, self._torch.maximum(generations, stored))

    def expect(self, step: int, inflight: InFlight[StepResult]) -> None:
        """Announce the copy that will bring the result of ``step``. On the event loop."""
        if step in self._expected:
            raise ValueError(f"step {step} is expected already")
        self._expected[step] = inflight

    async def arrival(self, step: int) -> StepResult:
        """The result of ``step`` when its copy has landed. Each step is given out once.

        If the wait is cancelled, the step stays expected and can be awaited again.

        Raises:
            KeyError: ``step`` is not expected, or was given out.
        """
        inflight = self._expected[step]
        try:
            return await inflight
        finally:
            if inflight.done():
                self._expected.pop(step, None)

    def _check(self, rows: torch.Tensor, generations: torch.Tensor, tokens: torch.Tensor) -> None:
        found = self._generations.index_select(0, rows)
        wrong = (found != generations) | (tokens == POISON)
        if wrong.any():
            at = int(wrong.int().argmax())
            raise RelayError(int(rows[at]), int(generations[at]), int(found[at]))
