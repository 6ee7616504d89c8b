"""The parameters of a dense model, layer by layer, as its layers want them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from aiosched.errors import ModelLoadError
from aiosched.model.dense_shape import Fetch
from aiosched.model.weights import Weights, in_int4, in_int8


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """One layer. Projections that read the same input are one: their outputs side by side."""

    attention_norm: torch.Tensor  # [hidden]
    qkv: Weights
    query_norm: torch.Tensor | None  # [head_dim]
    key_norm: torch.Tensor | None
    output: Weights
    mlp_norm: torch.Tensor
    gate_up: Weights
    down: Weights


class Parameters:
    """Parameters by name, in one dtype.

    Args:
        fetch: where they come from.
        dtype: of all floats.
        quantization: ``int8`` or ``int4``: the weights of linear layers in so many bits, from what
            they were before ``dtype``. The head has 8, from what it is in ``dtype``: it often
            is the embedding, which is kept so and not a second time as it came.

    Raises:
        ModelLoadError: from each method, if one is missing that must be there.
    """

    def __init__(self, fetch: Fetch, dtype: torch.dtype, quantization: str | None) -> None:
        self._fetch = fetch
        self._dtype = dtype
        self._quantization = quantization

    def __call__(self, name: str) -> torch.Tensor:
        return self._present(name).to(self._dtype)

    def layer(self, index: int) -> LayerWeights:
        """All of layer ``index``."""
        prefix = f"model.layers.{index}."
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        return LayerWeights(
            attention_norm=self(f"{prefix}input_layernorm.weight"),
            qkv=self.linear(attention, "q_proj", "k_proj", "v_proj"),
            query_norm=self._optional(f"{attention}q_norm.weight"),
            key_norm=self._optional(f"{attention}k_norm.weight"),
            output=self.linear(attention, "o_proj"),
            mlp_norm=self(f"{prefix}post_attention_layernorm.weight"),
            gate_up=self.linear(mlp, "gate_proj", "up_proj"),
            down=self.linear(mlp, "down_proj"),
        )

    def linear(self, prefix: str, *names: str) -> Weights:
        """One layer of all of ``names``."""
        rows = torch.cat([self._present(f"{prefix}{name}.weight") for name in names])
        biases = [self._optional(f"{prefix}{name}.bias") for name in names]
        given = [bias for bias in biases if bias is not None]
        if given and len(given) < len(names):
            raise ModelLoadError(f"only some of {prefix}{', '.join(names)} have a bias")
        bias = torch.cat(given) if given else None
        if self._quantization == "int4":
            return in_int4(rows, bias)
        return (
            in_int8(rows, bias) if self._quantization else Weights(rows.to(self._dtype), bias=bias)
        )

    def head(self, rows: torch.Tensor) -> Weights:
        """The output projection of these rows."""
        return in_int8(rows, None) if self._quantization else Weights(rows)

    def _optional(self, name: str) -> torch.Tensor | None:
        tensor = self._fetch(name)
        return None if tensor is None else tensor.detach().to(self._dtype)

    def _present(self, name: str) -> torch.Tensor:
        tensor = self._fetch(name)
        if tensor is None:
            raise ModelLoadError(f"the weights lack {name}")
        return tensor.detach()
