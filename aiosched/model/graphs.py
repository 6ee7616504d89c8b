"""CUDA graphs for decode: the launch cost of a whole forward paid once per batch size.

Only the forward is captured. Gathering from the relay, planning attention and sampling stay
outside; they depend on the host or on what the requests ask for.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from aiosched.model.inputs import DeviceInputs, Model, StepInputs


@runtime_checkable
class PlannedModel(Model, Protocol):
    """A ``Model`` with the optional part: host work of a forward, apart from its device work.

    A model that has ``plan`` promises that ``forward`` reads nothing of ``inputs.host``, so that
    it can be captured in a graph and replayed for later steps.
    """

    def plan(self, inputs: DeviceInputs, kv: object) -> None:
        """Prepare ``forward(inputs, kv)`` of the same step; called right before it on the forward
        stream, never while a graph is captured.

        For a batch that only decodes, ``inputs`` may be padded to a captured size, with tensors
        that have the same addresses in every step and page tables as wide as the longest sequence
        (those of ``inputs.host`` are padded to the same size, but no wider than the step needs).
        What ``plan`` prepares for that size has to keep its addresses too.
        """


def capture_sizes(max_batch: int) -> list[int]:
    """Batch sizes that get a graph: 1, 2, 4, then multiples of 8, and the largest itself."""
    sizes = [1, 2, 4, *range(8, max_batch + 1, 8)]
    return sorted({*(size for size in sizes if size <= max_batch), max_batch})


@dataclass(frozen=True, slots=True, eq=False)
class _Captured:
    """A graph and the logits it writes, ``[size, vocab]``."""

    graph: torch.cuda.CUDAGraph
    logits: torch.Tensor


class DecodeGraphs:
    """Captured decode forwards of one model and KV pool, each made when its size is first needed.

    Inputs are copied into buffers that all sizes share; a batch is padded to the next size with
    sequences of one token whose KV goes to page 0. All methods are device work of the forward
    stream, in inference mode.

    Args:
        max_batch: the largest batch to capture. Larger ones do not fit and run without a graph.
        max_pages: columns of a page table that hold the longest sequence.
    """

    def __init__(
        self,
        model: PlannedModel,
        kv: object,
        max_batch: int,
        max_pages: int,
        device: str,
    ) -> None:
        self._model = model
        self._kv = kv
        self._sizes = capture_sizes(max_batch)
        self._captured: dict[int, _Captured] = {}
        self._pool: Any = None  # memory that the graphs share: only one runs at a time

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self._input_ids = zeros(max_batch)
        self._positions = zeros(max_batch)
        self._slots = zeros(max_batch)
        self._page_tables = zeros(max_batch, max_pages, dtype=torch.int32)
        self._seq_lens = zeros(max_batch, dtype=torch.int32)
        self._query_start = torch.arange(max_batch + 1, dtype=torch.int32, device=device)
        self._logits_index = torch.arange(max_batch, device=device)

    def fits(self, step: StepInputs) -> bool:
        """Whether the step only decodes, samples every sequence, and is small enough."""
        n = step.num_sequences
        return (
            0 < n <= self._sizes[-1]
            and n == step.num_decodes == len(step.logits_index)
            and step.prompt_logprobs is None
            and step.page_tables.shape[1] <= self._page_tables.shape[1]
        )

    def forward(self, inputs: DeviceInputs) -> torch.Tensor:
        """Logits ``[n, vocab]``, valid until the next call."""
        n = inputs.host.num_sequences
        size = next(size for size in self._sizes if size >= n)
        captured = self._captured.get(size) or self._capture(size, inputs.host.page_size)
        self._fill(inputs, n, size)
        self._model.plan(self._static(_padded(inputs.host, size), size), self._kv)
        captured.graph.replay()
        return captured.logits[:n]

    def warm_up(self, page_size: int, given_up: threading.Event | None = None) -> None:
        """Capture every size, the largest first so that the others fit into its memory.

        ``given_up``: set from elsewhere, it ends this before the next size.
        """
        for size in reversed(self._sizes):
            if given_up is not None and given_up.is_set():
                return
            if size not in self._captured:
                self._capture(size, page_size)

    def _capture(self, size: int, page_size: int) -> _Captured:
        # Captured over padding alone: the runs before it must not write to anybody's pages.
        padding = self._static(_padded(StepInputs.empty(page_size), size), size)
        for tensor in (self._input_ids, self._positions, self._slots, self._page_tables):
            tensor.zero_()
        self._seq_lens.fill_(1)
        self._model.plan(padding, self._kv)
        for _ in range(2):  # lets libraries make their handles and workspaces outside the graph
            self._model.forward(padding, self._kv)
        graph = torch.cuda.CUDAGraph()
        # Only this thread is held to the rules of capture: the waiter thread goes on with events.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            logits = self._model.forward(padding, self._kv)
        self._pool = self._pool or graph.pool()
        captured = self._captured[size] = _Captured(graph, logits)
        return captured

    def _fill(self, inputs: DeviceInputs, n: int, size: int) -> None:
        for buffer, values in (
            (self._input_ids, inputs.input_ids),
            (self._positions, inputs.positions),
            (self._slots, inputs.slots),
        ):
            buffer[:n].copy_(values)
            buffer[n:size].zero_()
        # Columns past the step's own keep pages of earlier steps: beyond seq_lens, so never read.
        self._page_tables[:n, : inputs.page_tables.shape[1]].copy_(inputs.page_tables)
        self._page_tables[n:size].zero_()
        self._seq_lens[:n].copy_(inputs.seq_lens)
        self._seq_lens[n:size].fill_(1)

    def _static(self, host: StepInputs, size: int) -> DeviceInputs:
        return DeviceInputs(
            host=host,
            input_ids=self._input_ids[:size],
            positions=self._positions[:size],
            slots=self._slots[:size],
            page_tables=self._page_tables[:size],
            seq_lens=self._seq_lens[:size],
            query_start=self._query_start[: size + 1],
            logits_index=self._logits_index[:size],
        )


def _padded(step: StepInputs, size: int) -> StepInputs:
    """The decode step with padding up to ``size``: row 0, page 0, slot 0, one token long."""
    more = size - step.num_sequences
    every = np.arange(size, dtype=np.int64)
    return replace(
        step,
        num_decodes=size,
        rows=np.pad(step.rows, (0, more)),
        generations=np.pad(step.generations, (0, more)),
        query_start=np.arange(size + 1, dtype=np.int32),
        seq_lens=np.pad(step.seq_lens, (0, more), constant_values=1),
        page_tables=np.pad(step.page_tables, ((0, more), (0, 0))),
        input_ids=np.pad(step.input_ids, (0, more)),
        positions=np.pad(step.positions, (0, more)),
        slots=np.pad(step.slots, (0, more)),
        logits_index=every,
        sample_sequence=every,
    )
