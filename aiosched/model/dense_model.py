"""Llama, Qwen2 and Qwen3 on the CPU, written for few and large operations.

transformers' code for these models makes some forty small operations a layer, each with a few
microseconds of Python that hold the GIL, and its weights are repacked at every call. Here a layer
is four products with packed weights and as little as possible between them. Steps that only decode
can be one call of compiled code instead (``native``).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import rms_norm, silu

from aiosched.config import QUANTIZATIONS
from aiosched.errors import ModelLoadError
from aiosched.model.attention import PagedAttention
from aiosched.model.dense_shape import DenseShape, Fetch, rope_table
from aiosched.model.dense_weights import LayerWeights, Parameters
from aiosched.model.inputs import DeviceInputs
from aiosched.model.kv_pool import PagedKV
from aiosched.model.linear import make_linear
from aiosched.model.progress import Progress

if TYPE_CHECKING:
    from aiosched.model.native.decode import NativeDecoder


class DenseModel:
    """A dense decoder as an aiosched ``Model``, on the CPU.

    Args:
        shape: of the model.
        fetch: its parameters by their names in transformers, in any float dtype. Each is asked for
            once, layer by layer, and not kept as it came.
        dtype: of weights, activations and KV.
        tokenizer: what belongs to it, if there is one.
        eos_token_ids: tokens that end an answer.
        progress: told of each layer.
        quantization: ``int8`` stores the weights of linear layers in 8 bits; ``int4`` in 4, which
            only compiled code computes with.
        compile_in: a folder for compiled code: decode steps run in C++, built there if need be.

    Attributes:
        layers: how each layer attends.

    Raises:
        ModelLoadError: a parameter is missing; there is no compiler; or what is asked for does not
            go together.
    """

    def __init__(
        self,
        shape: DenseShape,
        fetch: Fetch,
        dtype: torch.dtype,
        *,
        tokenizer: Any = None,
        eos_token_ids: Sequence[int] = (),
        progress: Progress | None = None,
        quantization: str | None = None,
        compile_in: Path | None = None,
    ) -> None:
        if quantization is not None and quantization not in QUANTIZATIONS[1:]:
            kinds = ", ".join(QUANTIZATIONS[1:])
            raise ModelLoadError(f"quantization {quantization!r} is not one of {kinds}")
        if quantization == "int4" and compile_in is None:
            raise ModelLoadError(
                "quantization='int4' needs compile=True: torch has no products of it"
            )
        if quantization is not None and dtype != torch.bfloat16 and compile_in is None:
            raise ModelLoadError(
                f"quantization={quantization!r} needs dtype='bfloat16' or compile=True: torch "
                f"has no fast products of int8 and {str(dtype).removeprefix('torch.')}"
            )
        self.tokenizer = tokenizer
        self.vocab_size = shape.vocab_size
        self.max_model_len = shape.max_model_len
        self.eos_token_ids = tuple(eos_token_ids)
        self.layers = shape.attention()
        self.dtype = dtype
        self.device = torch.device("cpu")
        self._eps = shape.rms_norm_eps
        native = None
        if compile_in is not None:
            from aiosched.model.native.builder import NativeBuilder

            native = NativeBuilder(shape, dtype, compile_in)
        parameters = Parameters(fetch, dtype, quantization)
        self._embedding = parameters("model.embed_tokens.weight")
        self._layers = []
        for index in range(shape.num_layers):
            weights = parameters.layer(index)
            self._layers.append(_Layer(shape, weights, dtype, few_rows=native is None))
            if native is not None:
                native.add(weights)
            if progress is not None:
                progress("unpack weights", index + 1, shape.num_layers)
        self._norm = parameters("model.norm.weight")
        head = parameters.head(self._embedding if shape.tied else parameters("lm_head.weight"))
        self._head = make_linear(head, dtype, few_rows=native is None)
        self._cosine, self._sine = rope_table(shape, dtype)
        self._native: NativeDecoder | None = None
        if native is not None:
            self._native = native.build(self._embedding, self._norm, head)

    def kv_bytes_per_token(self) -> int:
        """Bytes of KV memory that one token takes over all layers."""
        return sum(layer.kv_values for layer in self.layers) * self.dtype.itemsize

    def make_kv(self, num_pages: int, page_size: int) -> PagedKV:
        """A pool of ``num_pages + 1`` pages in the model's dtype."""
        return PagedKV(self.layers, num_pages, page_size, self.dtype, self.device)

    @torch.inference_mode()
    def forward(self, inputs: DeviceInputs, kv: object) -> torch.Tensor:
        """Logits ``[m + q, vocab_size]`` in the model's dtype, or float32 of compiled steps; see
        ``inputs.Model``."""
        assert isinstance(kv, PagedKV)
        if self._native is not None and self._native.fits(inputs):
            return self._native.forward(inputs, kv)
        x = self._embedding.index_select(0, inputs.input_ids)
        cosine = self._cosine.index_select(0, inputs.positions).unsqueeze(1)
        sine = self._sine.index_select(0, inputs.positions).unsqueeze(1)
        attention = PagedAttention(self.layers, inputs, kv)
        for index, layer in enumerate(self._layers):
            x = layer.forward(index, x, cosine, sine, attention)
        wanted = x.index_select(0, inputs.logits_index)
        return self._head(rms_norm(wanted, wanted.shape[1:], self._norm, self._eps))


class _Layer:
    """The weights of one layer, and what it does with them."""

    def __init__(
        self, shape: DenseShape, weights: LayerWeights, dtype: torch.dtype, few_rows: bool
    ) -> None:
        self._heads = shape.num_heads
        self._rotated = shape.num_heads + shape.num_kv_heads
        self._all_heads = self._rotated + shape.num_kv_heads
        self._head_dim = shape.head_dim
        self._width = shape.intermediate_size
        self._hidden = (shape.hidden_size,)
        self._eps = shape.rms_norm_eps
        self._attention_norm, self._mlp_norm = weights.attention_norm, weights.mlp_norm
        self._query_norm, self._key_norm = weights.query_norm, weights.key_norm
        self._qkv = make_linear(weights.qkv, dtype, few_rows)
        self._output = make_linear(weights.output, dtype, few_rows)
        self._gate_up = make_linear(weights.gate_up, dtype, few_rows)
        self._down = make_linear(weights.down, dtype, few_rows)

    def forward(
        self,
        index: int,
        x: torch.Tensor,
        cosine: torch.Tensor,
        sine: torch.Tensor,
        attention: PagedAttention,
    ) -> torch.Tensor:
        """``x`` ``[t, hidden]`` after the layer; ``cosine`` and ``sine`` are ``[t, 1, dim]``."""
        qkv = self._qkv(rms_norm(x, self._hidden, self._attention_norm, self._eps))
        heads = qkv.view(-1, self._all_heads, self._head_dim)
        rotated = _rotate(self._normed(heads[:, : self._rotated]), cosine, sine)
        attended = attention.attend(
            index, rotated[:, : self._heads], rotated[:, self._heads :], heads[:, self._rotated :]
        )
        x = self._output.add(attended.flatten(1), x)
        gate_up = self._gate_up(rms_norm(x, self._hidden, self._mlp_norm, self._eps))
        gated = silu(gate_up[:, : self._width]).mul_(gate_up[:, self._width :])
        return self._down.add(gated, x)

    def _normed(self, heads: torch.Tensor) -> torch.Tensor:
        if self._query_norm is None or self._key_norm is None:
            return heads
        dim = (self._head_dim,)
        query = rms_norm(heads[:, : self._heads], dim, self._query_norm, self._eps)
        key = rms_norm(heads[:, self._heads :], dim, self._key_norm, self._eps)
        return torch.cat((query, key), dim=1)


def _rotate(heads: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    swapped = heads.view(*heads.shape[:2], 2, -1).flip(2).flatten(2)
    return torch.addcmul(heads * cosine, swapped, sine)
