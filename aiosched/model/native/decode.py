"""Decode steps of a ``DenseModel`` in one call of compiled code.

The call lets go of the GIL from token ids to logits, so a busy event loop costs the step nothing
but its core. What a step reads lies in numpy arrays and tensors that live as long as the call.
"""

from __future__ import annotations

import ctypes
import weakref
from pathlib import Path

import torch

from aiosched.errors import ModelLoadError
from aiosched.model.dense_shape import DenseShape, rope_table
from aiosched.model.dense_weights import LayerWeights
from aiosched.model.inputs import DeviceInputs
from aiosched.model.kv_pool import PagedKV
from aiosched.model.linear import Weights
from aiosched.model.native import structs
from aiosched.model.native.build import load_native

_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
_STRIDE = 32  # sizes are multiples of it, so that no vector or tile hangs over an edge
_TILE_BYTES = 64  # of one output's weights in a tile, which holds 16 outputs


class NativeBuilder:
    """Collects the weights of a model, layer by layer.

    Args:
        shape: of the model.
        dtype: of its floats.
        folder: where compiled code is kept.

    Raises:
        ModelLoadError: the code cannot be built, or has no way to compute this model.
    """

    def __init__(self, shape: DenseShape, dtype: torch.dtype, folder: Path) -> None:
        if dtype not in (torch.float32, torch.bfloat16):
            raise ModelLoadError(f"compile: {dtype} is not supported; float32 and bfloat16 are")
        sizes = {
            "hidden_size": shape.hidden_size,
            "intermediate_size": shape.intermediate_size,
            "vocab_size": shape.vocab_size,
            "num_attention_heads * head_dim": shape.num_heads * shape.head_dim,
            "num_key_value_heads * head_dim": shape.num_kv_heads * shape.head_dim,
            "2 * head_dim": 2 * shape.head_dim,
        }
        for name, size in sizes.items():
            if size % _STRIDE:
                raise ModelLoadError(f"compile: {name} = {size} is not a multiple of {_STRIDE}")
        self._library = load_native(folder)
        self._shape = shape
        self._dtype = dtype
        self._memory: list[torch.Tensor] = []  # what the records below point at
        self._layers: list[structs.Layer] = []
        self._library.aiosched_amx.restype = ctypes.c_int64
        self._tiled = dtype == torch.bfloat16 and bool(self._library.aiosched_amx())

    def add(self, weights: LayerWeights) -> None:
        """The next layer."""
        self._layers.append(
            structs.Layer(
                self._floats(weights.attention_norm),
                self._floats(weights.query_norm),
                self._floats(weights.key_norm),
                self._floats(weights.mlp_norm),
                self._matrix(weights.qkv),
                self._matrix(weights.output),
                self._matrix(weights.gate_up),
                self._matrix(weights.down),
            )
        )

    def build(self, embedding: torch.Tensor, norm: torch.Tensor, head: Weights) -> NativeDecoder:
        """The decoder of all that was added."""
        shape = self._shape
        cosine, sine = rope_table(shape, torch.float32)
        model = structs.Model(
            layers=shape.num_layers,
            hidden=shape.hidden_size,
            width=shape.intermediate_size,
            heads=shape.num_heads,
            kv_heads=shape.num_kv_heads,
            dim=shape.head_dim,
            vocab=shape.vocab_size,
            weight_kind=_KINDS[head.rows.dtype],
            kv_kind=_KINDS[self._dtype],
            tiled=self._tiled,
            eps=shape.rms_norm_eps,
            embedding=self._kept(embedding),
            norm=self._floats(norm),
            cosine=self._floats(cosine),
            sine=self._floats(sine),
            layer=(structs.Layer * shape.num_layers)(*self._layers),
            head=self._matrix(head),
        )
        return NativeDecoder(self._library, model, self._memory)

    def _matrix(self, weights: Weights) -> structs.Matrix:
        rows = in_tiles(weights.rows) if self._tiled else weights.rows
        return structs.Matrix(
            self._kept(rows), self._floats(weights.scale), self._floats(weights.bias)
        )

    def _floats(self, tensor: torch.Tensor | None) -> int | None:
        return None if tensor is None else self._kept(tensor.float())

    def _kept(self, tensor: torch.Tensor) -> int:
        tensor = tensor.contiguous()
        self._memory.append(tensor)
        return tensor.data_ptr()


class NativeDecoder:
    """Runs decode steps. Made by ``NativeBuilder``."""

    def __init__(
        self, library: ctypes.CDLL, model: structs.Model, memory: list[torch.Tensor]
    ) -> None:
        self._model = model
        self._memory = memory
        self._decode = library.aiosched_decode
        self._decode.argtypes = (ctypes.c_void_p,) * 3
        self._decode.restype = None
        self._scratch_floats = library.aiosched_scratch_floats
        self._scratch_floats.argtypes = (ctypes.c_void_p, *[ctypes.c_int64] * 3)
        self._scratch_floats.restype = ctypes.c_int64
        self._teams = _Teams(library)

    def fits(self, inputs: DeviceInputs) -> bool:
        """Whether every sequence of the step decodes, and samples."""
        host = inputs.host
        count = host.num_sequences
        return (
            0 < count == host.num_decodes == len(host.sample_sequence)
            and host.prompt_logprobs is None
        )

    def forward(self, inputs: DeviceInputs, kv: PagedKV) -> torch.Tensor:
        """Logits float32 ``[n, vocab]`` of the ``n`` sequences."""
        model, batch, threads = self._model, inputs.host.num_sequences, torch.get_num_threads()
        longest = int(inputs.host.seq_lens.max())
        reference = ctypes.addressof(model)
        scratch = torch.empty(self._scratch_floats(reference, batch, longest, threads))
        logits = torch.empty(batch, model.vocab)
        tables = inputs.page_tables
        keys, values = _pointers(kv.keys), _pointers(kv.values)
        step = structs.Step(
            batch=batch,
            page_size=kv.page_size,
            table_stride=tables.stride(0),
            ids=inputs.input_ids.data_ptr(),
            positions=inputs.positions.data_ptr(),
            slots=inputs.slots.data_ptr(),
            tables=tables.data_ptr(),
            lengths=inputs.seq_lens.data_ptr(),
            keys=ctypes.addressof(keys),
            values=ctypes.addressof(values),
            scratch=scratch.data_ptr(),
            logits=logits.data_ptr(),
        )
        self._decode(reference, ctypes.addressof(step), self._teams.of(threads))
        return logits


class _Teams:
    """The threads beside the calling one: a team for as many as it asks for, kept until it asks
    for another number, or until this is dropped."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._new = library.aiosched_team
        self._new.argtypes = (ctypes.c_int64,)
        self._new.restype = ctypes.c_void_p
        self._end = library.aiosched_team_end
        self._end.argtypes = (ctypes.c_void_p,)
        self._end.restype = None
        self._threads = 0
        self._team = 0
        self._finalize: weakref.finalize[[int], _Teams] | None = None

    def of(self, threads: int) -> int:
        """Handle of the team of ``threads``, the calling one included."""
        if threads != self._threads:
            if self._finalize is not None:
                self._finalize()
            self._team = self._new(threads)
            self._threads = threads
            self._finalize = weakref.finalize(self, self._end, self._team)
        return self._team


def _pointers(tensors: tuple[torch.Tensor, ...]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))


def in_tiles(rows: torch.Tensor) -> torch.Tensor:
    """Weights ``[n, k]`` as AMX multiplies with them: ``[n / 16, k bytes / 64, 16, 16, 4 bytes]``,
    the four bytes of one output together, padded with zeros along ``k``."""
    n, k = rows.shape
    numbers = _TILE_BYTES // rows.itemsize
    if k % numbers:
        rows = torch.nn.functional.pad(rows, (0, numbers - k % numbers))
    return rows.view(n // 16, 16, -1, 16, numbers // 16).permute(0, 2, 3, 1, 4).contiguous()
