"""The parameters of a dense model, layer by layer, as its layers want them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from aiosched.errors import ModelLoadError
from aiosched.model.dense_shape import Fetch
from aiosched.model.linear import Weights, quantized


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
        quantize: linear layers become int8.

    Raises:
        ModelLoadError: from each method, if one is missing that must be there.
    """

    def __init__(self, fetch: Fetch, dtype: torch.dtype, quantize: bool) -> None:
        self._fetch = fetch
        self._dtype = dtype
        self._quantize = quantize

    def __call__(self, name: str) -> torch.Tensor:
        tensor = self._optional(name)
        if tensor is None:
            raise ModelLoadError(f"the weights lack {name}")
        return tensor

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
        rows = torch.cat([self(f"{prefix}{name}.weight") for name in names])
        biases = [self._optional(f"{prefix}{name}.bias") for name in names]
        given = [bias for bias in biases if bias is not None]
        if given and len(given) < len(names):
            raise ModelLoadError(f"only some of {prefix}{', '.join(names)} have a bias")
        return self.weights(rows, torch.cat(given) if given else None)

    def weights(self, rows: torch.Tensor, bias: torch.Tensor | None = None) -> Weights:
        """A layer of these rows."""
        return quantized(rows, bias) if self._quantize else Weights(rows, bias=bias)

    def _optional(self, name: str) -> torch.Tensor | None:
        tensor = self._fetch(name)
        return None if tensor is None else tensor.detach().to(self._dtype)
