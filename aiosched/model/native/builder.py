"""The weights of a ``DenseModel`` as compiled code reads them: checked, laid out, pointed at."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

from aiosched.errors import ModelLoadError
from aiosched.model.dense_shape import DenseShape, rope_table
from aiosched.model.dense_weights import LayerWeights
from aiosched.model.native import structs
from aiosched.model.native.build import load_native
from aiosched.model.native.decode import NativeDecoder
from aiosched.model.native.layout import in_groups, in_tiles
from aiosched.model.weights import GROUP, Weights

_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2, torch.uint8: 3}
_STRIDE = 32  # sizes are multiples of it, so that no vector or tile hangs over an edge


class NativeBuilder:
    """Collects the weights of a model, layer by layer.

    Args:
        shape: of the model.
        dtype: of its floats.
        folder: where compiled code is kept.

    Raises:
        ModelLoadError: the code cannot be built, or has no way to compute this model. From the
            methods: a tensor is not of the model's shape.
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
        self._weight_dtype: torch.dtype | None = None
        self._library.aiosched_amx.restype = ctypes.c_int64
        self._tiled = dtype == torch.bfloat16 and bool(self._library.aiosched_amx())

    def add(self, weights: LayerWeights) -> None:
        """The next layer."""
        shape, layer = self._shape, f"layer {len(self._layers)} "
        hidden, width, dim = shape.hidden_size, shape.intermediate_size, shape.head_dim
        inner, all_heads = shape.num_heads * dim, (shape.num_heads + 2 * shape.num_kv_heads) * dim
        self._layers.append(
            structs.Layer(
                self._floats(layer + "attention norm", weights.attention_norm, hidden),
                self._optional(layer + "query norm", weights.query_norm, dim),
                self._optional(layer + "key norm", weights.key_norm, dim),
                self._floats(layer + "mlp norm", weights.mlp_norm, hidden),
                self._matrix(layer + "q, k, v", weights.qkv, all_heads, hidden),
                self._matrix(layer + "output", weights.output, hidden, inner),
                self._matrix(layer + "gate, up", weights.gate_up, 2 * width, hidden),
                self._matrix(layer + "down", weights.down, hidden, width),
            )
        )

    def build(self, embedding: torch.Tensor, norm: torch.Tensor, head: Weights) -> NativeDecoder:
        """The decoder of all that was added."""
        shape = self._shape
        _check("inv_freq", shape.inv_freq, (shape.head_dim // 2,))
        cosine, sine = rope_table(shape, torch.float32)
        angles = shape.max_model_len * shape.head_dim
        kind = self._weight_dtype or head.rows.dtype
        self._weight_dtype = torch.int8 if kind == torch.uint8 else kind
        of_head = self._matrix("head", head, shape.vocab_size, shape.hidden_size)
        _check("embedding", embedding, (shape.vocab_size, shape.hidden_size), self._dtype)
        model = structs.Model(
            layers=shape.num_layers,
            hidden=shape.hidden_size,
            width=shape.intermediate_size,
            heads=shape.num_heads,
            kv_heads=shape.num_kv_heads,
            dim=shape.head_dim,
            vocab=shape.vocab_size,
            positions=shape.max_model_len,
            weight_kind=_KINDS[kind],
            kv_kind=_KINDS[self._dtype],
            tiled=self._tiled,
            eps=shape.rms_norm_eps,
            embedding=self._kept(embedding),
            norm=self._floats("norm", norm, shape.hidden_size),
            cosine=self._floats("cosine", cosine.flatten(), angles),
            sine=self._floats("sine", sine.flatten(), angles),
            layer=(structs.Layer * shape.num_layers)(*self._layers),
            head=of_head,
        )
        return NativeDecoder(self._library, model, self._memory)

    def _matrix(self, name: str, weights: Weights, outputs: int, inputs: int) -> structs.Matrix:
        if self._weight_dtype is None:
            self._weight_dtype = weights.rows.dtype
        _check(name, weights.rows, (outputs, inputs), self._weight_dtype)
        scale, minimum = weights.scale, weights.minimum
        if scale is not None and minimum is not None:
            _check(f"{name} scale", scale, (outputs, inputs // GROUP), torch.float16)
            _check(f"{name} minimum", minimum, (outputs, inputs // GROUP), torch.float16)
            rows, scale = in_groups(weights.rows, scale, minimum), None
        else:
            rows = in_tiles(weights.rows) if self._tiled else weights.rows
        return structs.Matrix(
            self._kept(rows),
            self._optional(f"{name} scale", scale, outputs),
            self._optional(f"{name} bias", weights.bias, outputs),
        )

    def _optional(self, name: str, tensor: torch.Tensor | None, size: int) -> int | None:
        return None if tensor is None else self._floats(name, tensor, size)

    def _floats(self, name: str, tensor: torch.Tensor, size: int) -> int:
        _check(name, tensor, (size,))
        return self._kept(tensor.float())

    def _kept(self, tensor: torch.Tensor) -> int:
        tensor = tensor.contiguous()
        self._memory.append(tensor)
        return tensor.data_ptr()


def _check(
    name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype | None = None
) -> None:
    """Compiled code trusts what it is pointed at: nothing of another size may come to it."""
    if tensor.shape != shape:
        raise ModelLoadError(f"compile: {name} is {list(tensor.shape)}, not {list(shape)}")
    if dtype is not None and tensor.dtype != dtype:
        raise ModelLoadError(f"compile: {name} is {tensor.dtype}, not {dtype}")
