"""The dense decoder family: what llama, qwen2 and qwen3 have in common, and where weights lie."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch

from aiosched.model.kv_pool import LayerAttention

Fetch: TypeAlias = Callable[[str], torch.Tensor | None]
"""A parameter by its name in transformers; ``None``: the model has none of this name."""


@dataclass(frozen=True, slots=True)
class DenseShape:
    """A decoder of ``num_layers`` equal layers: grouped-query attention over the whole sequence
    with rotary positions, and a gated feed-forward (SiLU), each behind an RMS norm.

    Biases and norms of queries and keys are there if the weights have them.

    Attributes:
        inv_freq: float32 ``[head_dim / 2]``, the angle of each rotary pair per position. Pairs are
            (i, i + head_dim / 2), as in transformers.
        tied: the embedding is the output projection too.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_model_len: int
    rms_norm_eps: float
    tied: bool
    inv_freq: torch.Tensor

    def attention(self) -> list[LayerAttention]:
        """How each layer attends."""
        layer = LayerAttention(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            key_dim=self.head_dim,
            value_dim=self.head_dim,
            scaling=float(self.head_dim**-0.5),
        )
        return [layer] * self.num_layers


def rope_table(shape: DenseShape, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and signed sine of every position, ``[max_model_len, head_dim]`` each.

    ``x * cosine + swapped(x) * sine`` rotates, where ``swapped`` exchanges the halves of ``x``.
    """
    positions = torch.arange(shape.max_model_len, dtype=torch.float32)
    angles = positions[:, None] * shape.inv_freq[None]
    cosine, sine = angles.cos(), angles.sin()
    return (
        torch.cat((cosine, cosine), dim=1).to(dtype),
        torch.cat((-sine, sine), dim=1).to(dtype),
    )
