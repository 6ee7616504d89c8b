"""The KV pool: keys and values of every layer, in pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """How one layer attends. What is ``None`` or False does not happen.

    Attributes:
        num_heads: query heads; a multiple of ``num_kv_heads``.
        window: a query sees the last ``window`` tokens, itself included.
        softcap: scores pass through ``softcap * tanh(score / softcap)`` before the softmax.
        sinks: each head has a learned score that takes part in the softmax without a value.
    """

    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    scaling: float
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False

    @property
    def kv_values(self) -> int:
        """Numbers that one token leaves in the pool."""
        return self.num_kv_heads * (self.key_dim + self.value_dim)


class PagedKV:
    """One tensor of keys and one of values per layer: ``[num_pages + 1, page_size, heads, dim]``.

    Page 0 is padding. Memory starts as zeros; a page that comes back keeps what it held, so readers
    must only ever touch the tokens that their sequence has written.
    """

    __slots__ = (
        "_key_heads",
        "_key_slots",
        "_value_heads",
        "_value_slots",
        "keys",
        "page_size",
        "values",
    )

    def __init__(
        self,
        layers: Sequence[LayerAttention],
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        def pages(heads: int, dim: int) -> torch.Tensor:
            shape = (num_pages + 1, page_size, heads, dim)
            if torch.device(device).type != "cpu":
                return torch.zeros(shape, dtype=dtype, device=device)
            # Zeros of numpy take no memory before they are written to, and no time; torch writes.
            zeros = np.zeros((*shape[:3], dim * dtype.itemsize), np.uint8)
            return torch.from_numpy(zeros).view(dtype)

        self.page_size = page_size
        self.keys = tuple(pages(layer.num_kv_heads, layer.key_dim) for layer in layers)
        self.values = tuple(pages(layer.num_kv_heads, layer.value_dim) for layer in layers)
        self._key_slots = [keys.flatten(0, 1).flatten(1) for keys in self.keys]
        self._value_slots = [values.flatten(0, 1).flatten(1) for values in self.values]
        self._key_heads = [keys.flatten(0, 2) for keys in self.keys]
        self._value_heads = [values.flatten(0, 2) for values in self.values]

    def write(
        self, layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """Store ``key`` and ``value`` ``[t, kv_heads, dim]`` at ``slots`` ``[t]``."""
        self._key_slots[layer].index_copy_(0, slots, key.flatten(1))
        self._value_slots[layer].index_copy_(0, slots, value.flatten(1))

    def read(self, layer: int, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values ``[b, kv_heads, length, dim]`` at ``index`` of ``head_index``'s shape.

        Selecting (token, head) rows brings the heads to the front while copying, which is the
        order that attention wants and costs no more than copying whole pages.
        """
        flat = index.flatten()
        keys = self._key_heads[layer].index_select(0, flat)
        values = self._value_heads[layer].index_select(0, flat)
        return keys.view(*index.shape, -1), values.view(*index.shape, -1)


def head_index(slots: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """Rows for ``PagedKV.read``, ``[b, heads, length]``, of the tokens at ``slots``
    ``[b, length]``."""
    heads = torch.arange(num_kv_heads, device=slots.device)
    return slots[:, None, :] * num_kv_heads + heads[None, :, None]
