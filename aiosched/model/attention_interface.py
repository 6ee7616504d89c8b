"""Where transformers' model code calls our attention.

transformers looks attention functions up by name; ``NAME`` is ours. It is one function for all
models and steps: what a step needs comes in with the call, as the keyword ``paged_context`` that
the model code hands down to each layer.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from transformers import AttentionInterface

NAME = "aiosched_paged"


class AttentionContext(Protocol):
    """The attention of one forward."""

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: dict[str, Any],
    ) -> torch.Tensor:
        """One layer: ``query`` ``[t, heads, dim]``, ``key`` and ``value`` ``[t, kv_heads, dim]``,
        and the other keywords of transformers' call. Returns ``[t, heads, value_dim]``."""


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    paged_context: AttentionContext | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention signature: ``query`` is ``[1, heads, t, dim]``, the result
    ``[1, t, heads, value_dim]``."""
    if paged_context is None:
        raise RuntimeError(f"{NAME!r} attention works only inside aiosched's TransformersModel")
    output = paged_context.attend(
        module,
        query.squeeze(0).transpose(0, 1),
        key.squeeze(0).transpose(0, 1),
        value.squeeze(0).transpose(0, 1),
        options if attention_mask is None else {**options, "attention_mask": attention_mask},
    )
    return output.unsqueeze(0), None


AttentionInterface.register(NAME, paged_attention)
