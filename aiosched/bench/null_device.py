"""A model and a device that compute nothing: what is left is what the host does.

Results come from a table of tokens, drawn once. Nothing is bypassed on the way there: the
scheduler, the runner's launches and the streams are those of any engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from aiosched.device.stream import DeviceClosed, InFlight
from aiosched.model.inputs import DeviceInputs, IntArray, StepInputs, StepResult
from aiosched.text.tokenizer import TokenizerLike

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

TABLE = 1 << 17
"""Tokens in a table: more than any batch has rows, so that two steps seldom give the same."""


class NullModel:
    """The outside of a model. Its device never calls ``forward``.

    Args:
        tokenizer: of the text that streams make of the tokens; ``None``: they carry ids alone.
    """

    def __init__(
        self,
        vocab_size: int,
        *,
        max_model_len: int = 8192,
        eos_token_ids: tuple[int, ...] = (),
        tokenizer: TokenizerLike | None = None,
    ) -> None:
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.eos_token_ids = eos_token_ids
        self.tokenizer = tokenizer

    def kv_bytes_per_token(self) -> int:
        return 1

    def make_kv(self, num_pages: int, page_size: int) -> object:
        return ()

    def forward(self, inputs: DeviceInputs, kv: object) -> torch.Tensor:
        raise NotImplementedError("this model is for devices that run no forward")


class CannedResults:
    """Results of steps, from a table of ``tokens`` (int64) instead of a model."""

    def __init__(self, tokens: IntArray) -> None:
        self._table = tokens
        self._rows: dict[int, int] = {}  # step → rows that sample

    @classmethod
    def drawn(cls, vocab_size: int, without: Sequence[int] = (), seed: int = 0) -> CannedResults:
        """Random ids of a vocabulary, none of them in ``without`` (end tokens, say).

        They are as frequent as words in a text: the n-th, from 0, as 1 / (n + 2.7)
        (Mandelbrot, *An informational theory of the statistical structure of language*, 1953).
        """
        rng = np.random.default_rng(seed)
        ids = np.setdiff1d(np.arange(vocab_size), np.asarray(without, dtype=np.int64))
        often = 1 / (np.arange(len(ids)) + 2.7)
        drawn = rng.choice(rng.permutation(ids), TABLE, p=often / often.sum())
        return cls(drawn.astype(np.int64))

    def launched(self, inputs: StepInputs) -> None:
        """The forward of a step was launched."""
        self._rows[inputs.step] = len(inputs.sample_sequence)

    def landed(self, step: int) -> StepResult:
        """What its copy brings. Once for each step."""
        rows = self._rows.pop(step)
        start = step * 977 % (len(self._table) - rows)
        return StepResult(tokens=self._table[start : start + rows])


class NullDevice:
    """A device whose work is done the moment it is launched.

    Args:
        results: where the tokens come from.
        on_step: called with the inputs of each step when its forward is launched.
    """

    kind = "sim"
    torch_device = "cpu"

    def __init__(
        self, results: CannedResults, on_step: Callable[[StepInputs], None] | None = None
    ) -> None:
        self.schedule = _DoneStream(self, "schedule")
        self.forward = _ForwardStream(self, "forward")
        self.copy = _CopyStream(self, "copy")
        self.results = results
        self.on_step = on_step
        self.loop: asyncio.AbstractEventLoop | None = None

    def open(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop

    def close(self, timeout: float) -> None:
        self.loop = None

    def now(self) -> float:
        return perf_counter()

    def host_access(self, *, reads: Sequence[object] = (), writes: Sequence[object] = ()) -> None:
        pass


class _DoneStream:
    """Work on it gives ``None`` at once."""

    def __init__(self, device: NullDevice, name: str) -> None:
        self.name = name
        self._device = device

    def launch(
        self,
        fn: Callable[[], T],
        *,
        step: int,
        label: str,
        after: Sequence[InFlight[Any]] = (),
        reads: Sequence[object] = (),
        writes: Sequence[object] = (),
    ) -> InFlight[T]:
        return self._done(step, label)

    def _done(self, step: int, label: str, value: Any = None) -> InFlight[Any]:
        device = self._device
        if device.loop is None:
            raise DeviceClosed("the device is not open")
        flight: InFlight[Any] = InFlight(step, label, device.loop)
        flight._finish(value)
        return flight


class _ForwardStream(_DoneStream):
    def launch(
        self,
        fn: Callable[[], T],
        *,
        step: int,
        label: str,
        after: Sequence[InFlight[Any]] = (),
        reads: Sequence[object] = (),
        writes: Sequence[object] = (),
    ) -> InFlight[T]:
        device = self._device
        inputs = inputs_of(reads)
        if inputs is not None:
            device.results.launched(inputs)
            if device.on_step is not None:
                device.on_step(inputs)
        flight = self._done(step, label)
        flight.started = flight.finished = perf_counter()
        return flight


class _CopyStream(_DoneStream):
    def launch(
        self,
        fn: Callable[[], T],
        *,
        step: int,
        label: str,
        after: Sequence[InFlight[Any]] = (),
        reads: Sequence[object] = (),
        writes: Sequence[object] = (),
    ) -> InFlight[T]:
        return self._done(step, label, self._device.results.landed(step))


def inputs_of(reads: Sequence[object]) -> StepInputs | None:
    """The step's inputs among what a forward says it reads."""
    return next((item for item in reads if isinstance(item, StepInputs)), None)
