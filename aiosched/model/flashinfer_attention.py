"""Paged attention by FlashInfer, on CUDA (the ``cuda`` extra).

FlashInfer splits each batch over the GPU on the host (``plan``) and then runs that plan in every
layer (``run``). A step plans once per kind of layer: layers that differ in heads, window or cap
need plans of their own. Batches that only decode use wrappers with fixed buffers, one per batch
size, so that a CUDA graph captured over ``run`` stays valid when the next step is planned.

FlashInfer: Ye et al., "FlashInfer: Efficient and Customizable Attention Engine for LLM Inference
Serving", MLSys 2025.
"""

from __future__ import annotations

import importlib.util
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from aiosched.model.inputs import DeviceInputs, StepInputs
from aiosched.model.kv_pool import LayerAttention, PagedKV
from aiosched.model.transformers_model import TransformersModel

# Sizes that FlashInfer has kernels for in all versions that the extra allows.
HEAD_DIMS = frozenset({64, 128, 256})
# Larger decode batches are planned without fixed buffers. The same number as the graphs use.
MAX_FIXED_BATCH = 256
# Query heads per KV head that its decode kernel without tensor cores is compiled for.
SMALL_GROUPS = frozenset({1, 2, 3})
FLOAT_WORKSPACE = 256 << 20
INT_WORKSPACE = 8 << 20


def usable_for(model: TransformersModel) -> bool:
    """Whether FlashInfer is installed and can do all that ``model`` asks of attention."""
    return (
        model.device.type == "cuda"
        and model.dtype in (torch.float16, torch.bfloat16)
        and all(
            layer.key_dim == layer.value_dim and layer.key_dim in HEAD_DIMS and not layer.sinks
            for layer in model.layers
        )
        and importlib.util.find_spec("flashinfer") is not None
    )


class FlashInferModel(TransformersModel):
    """A ``TransformersModel`` whose attention is FlashInfer's; a ``graphs.PlannedModel``."""

    def make_kv(self, num_pages: int, page_size: int) -> FlashInferKV:
        """A pool with the workspaces of its planner: about 0.3 GB on top of the pages."""
        max_pages = -(-self.max_model_len // page_size)
        return FlashInferKV(self.layers, num_pages, page_size, self.dtype, self.device, max_pages)

    def plan(self, inputs: DeviceInputs, kv: object) -> None:
        """Plan the attention of ``forward(inputs, kv)``, which must come next on this stream."""
        assert isinstance(kv, FlashInferKV)
        kv.planner.plan(inputs.host)

    def forward(self, inputs: DeviceInputs, kv: object) -> torch.Tensor:
        assert isinstance(kv, FlashInferKV)
        return self._run(inputs, _FlashInferContext(self.layers, inputs, kv))


class FlashInferKV(PagedKV):
    """A KV pool and the planner of the attention over it."""

    __slots__ = ("planner",)

    def __init__(
        self,
        layers: Sequence[LayerAttention],
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        max_pages: int,
    ) -> None:
        super().__init__(layers, num_pages, page_size, dtype, device)
        self.planner = Planner(layers, dtype, device, max_pages)


class _FlashInferContext:
    """One forward: writes KV and runs the plan of each layer."""

    __slots__ = ("_kv", "_layers", "_runs", "_slots")

    def __init__(
        self, layers: Sequence[LayerAttention], inputs: DeviceInputs, kv: FlashInferKV
    ) -> None:
        self._layers = layers
        self._kv = kv
        self._slots = inputs.slots
        self._runs = kv.planner.planned(len(inputs.slots))

    def attend(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: dict[str, Any],
    ) -> torch.Tensor:
        layer = module.layer_idx
        self._kv.write(layer, self._slots, key, value)
        pool = (self._kv.keys[layer], self._kv.values[layer])
        output: torch.Tensor = self._runs[self._layers[layer]].run(query.contiguous(), pool)
        return output


@dataclass(slots=True, eq=False)
class Stage:
    """Pinned memory that copies to the GPU read from, and the event behind the last of them."""

    workspaces: list[torch.Tensor]  # per kind of layer; FlashInfer's plan writes here
    lists: torch.Tensor  # int32: indptr, last page lengths, indices, query starts
    copied: Any  # torch.cuda.Event, whose methods have no types


class Stages:
    """Stages that take turns: as many as there are steps whose copies the GPU has yet to make.

    That is bounded by the depth of the overlap, so after a few steps no more are made, and taking
    one never waits for the GPU.
    """

    def __init__(self, make: Callable[[], Stage]) -> None:
        self._make = make
        self._stages: deque[Stage] = deque()  # the least recently taken first

    def take(self) -> Stage:
        """A stage that no copy reads from."""
        if self._stages and self._stages[0].copied.query():
            stage = self._stages.popleft()
        else:
            stage = self._make()
        self._stages.append(stage)
        return stage


class Planner:
    """Plans steps. Host work plus copies on the current stream; never while a graph is captured.

    The arrays of a plan reach the GPU by asynchronous copies out of pinned memory, FlashInfer's
    own out of a buffer that its next ``plan`` would overwrite. So each plan takes a ``Stage`` that
    is used again only when its copies are known to be done.

    Args:
        layers: of the model. Equal ones share a plan.
        max_pages: pages of the longest sequence.
    """

    def __init__(
        self,
        layers: Sequence[LayerAttention],
        dtype: torch.dtype,
        device: torch.device,
        max_pages: int,
    ) -> None:
        self._kinds = list(dict.fromkeys(layers))
        self._dtype = dtype
        self._device = device
        self._float_workspace = torch.zeros(FLOAT_WORKSPACE, dtype=torch.uint8, device=device)
        self._int_workspaces = [
            torch.empty(INT_WORKSPACE, dtype=torch.uint8, device=device) for _ in self._kinds
        ]
        # One list of pages for all sizes: steps follow each other on one stream, and each writes
        # its own before it runs.
        self._indices = torch.zeros(MAX_FIXED_BATCH * max_pages, dtype=torch.int32, device=device)
        self._stages = Stages(self._new_stage)
        self._fixed: dict[int, list[Any]] = {}
        self._free_form: list[Any] | None = None
        self._current: tuple[int, dict[LayerAttention, Any]] | None = None

    def planned(self, num_tokens: int) -> dict[LayerAttention, Any]:
        """The wrappers of the step planned last, which must be one of ``num_tokens`` tokens."""
        if self._current is None or self._current[0] != num_tokens:
            raise RuntimeError(f"no plan for a step of {num_tokens} tokens: plan() comes first")
        return self._current[1]

    def plan(self, step: StepInputs) -> None:
        """Plan ``step``; it stays the current plan until the next call."""
        stage = self._stages.take()
        n = step.num_sequences
        only_decodes = n == step.num_decodes == step.num_tokens
        indptr, indices, last_page = page_lists(step)
        pinned = _Pinned(stage, len(indptr) + len(indices) + len(last_page) + n + 1)
        host_indptr, host_last = pinned.put(indptr), pinned.put(last_page)
        device_indices = pinned.put(indices).to(self._device, non_blocking=True)
        if only_decodes and n <= MAX_FIXED_BATCH:
            wrappers = self._fixed.get(n) or self._new_fixed(n)
            starts: tuple[torch.Tensor, ...] = ()
        else:
            wrappers = self._free_form = self._free_form or self._new_free_form()
            starts = (pinned.put(step.query_start),)
        for number, (kind, wrapper) in enumerate(zip(self._kinds, wrappers, strict=True)):
            wrapper._pin_memory_int_workspace_buffer = stage.workspaces[number]
            wrapper.plan(
                *starts,
                host_indptr,
                device_indices,
                host_last,
                kind.num_heads,
                kind.num_kv_heads,
                kind.key_dim,
                step.page_size,
                # Its windows count the tokens to the left of the query, ours the query too.
                window_left=-1 if kind.window is None else kind.window - 1,
                logits_soft_cap=kind.softcap,
                sm_scale=kind.scaling,
                q_data_type=self._dtype,
                kv_data_type=self._dtype,
                non_blocking=True,
                **({"causal": True} if starts else {}),
            )
        stage.copied.record()
        self._current = (step.num_tokens, dict(zip(self._kinds, wrappers, strict=True)))

    def _new_stage(self) -> Stage:
        workspaces = [
            torch.empty(INT_WORKSPACE, dtype=torch.uint8, pin_memory=True) for _ in self._kinds
        ]
        return Stage(workspaces, torch.empty(0, dtype=torch.int32), torch.cuda.Event())  # type: ignore[no-untyped-call]

    def _new_fixed(self, size: int) -> list[Any]:
        from flashinfer import BatchDecodeWithPagedKVCacheWrapper

        def ints(count: int) -> torch.Tensor:
            return torch.zeros(count, dtype=torch.int32, device=self._device)

        wrappers = [
            BatchDecodeWithPagedKVCacheWrapper(
                self._float_workspace,
                "NHD",
                use_cuda_graph=True,
                use_tensor_cores=kind.num_heads // kind.num_kv_heads not in SMALL_GROUPS,
                paged_kv_indptr_buffer=ints(size + 1),
                paged_kv_indices_buffer=self._indices,
                paged_kv_last_page_len_buffer=ints(size),
            )
            for kind in self._kinds
        ]
        self._fixed[size] = self._share_workspaces(wrappers)
        return wrappers

    def _new_free_form(self) -> list[Any]:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        return self._share_workspaces(
            [BatchPrefillWithPagedKVCacheWrapper(self._float_workspace, "NHD") for _ in self._kinds]
        )

    def _share_workspaces(self, wrappers: list[Any]) -> list[Any]:
        for wrapper, workspace in zip(wrappers, self._int_workspaces, strict=True):
            wrapper.reset_workspace_buffer(self._float_workspace, workspace)
        return wrappers


class _Pinned:
    """Places int32 arrays one behind the other in a stage's pinned memory."""

    def __init__(self, stage: Stage, size: int) -> None:
        if len(stage.lists) < size:
            stage.lists = torch.empty(max(size, 1024) * 2, dtype=torch.int32, pin_memory=True)
        self._memory = stage.lists
        self._used = 0

    def put(self, values: np.ndarray[Any, np.dtype[np.int32]]) -> torch.Tensor:
        place = self._memory[self._used : self._used + len(values)]
        self._used += len(values)
        place.numpy()[:] = values
        return place


def page_lists(
    step: StepInputs,
) -> tuple[
    np.ndarray[Any, np.dtype[np.int32]],
    np.ndarray[Any, np.dtype[np.int32]],
    np.ndarray[Any, np.dtype[np.int32]],
]:
    """A step's page tables as FlashInfer takes them: ``indptr`` ``[n + 1]`` into ``indices``, the
    pages of all sequences in a row, and how many tokens each last page holds ``[n]``. int32."""
    counts = -(-step.seq_lens // step.page_size)
    indptr = np.zeros(step.num_sequences + 1, np.int32)
    np.cumsum(counts, out=indptr[1:])
    used = np.arange(step.page_tables.shape[1]) < counts[:, None]
    last_page = step.seq_lens - (counts - 1) * step.page_size
    return indptr, step.page_tables[used], last_page.astype(np.int32)
