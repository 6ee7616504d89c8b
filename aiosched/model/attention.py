"""Paged attention in plain torch: the CPU's path, and CUDA's where FlashInfer is missing.

Each step makes one ``PagedAttention``. It writes the KV of the step's tokens, then attends: decode
sequences of similar length together in one batch, extend sequences one by one. Indices and masks
depend on the step and the window, not on the layer, so they are made once and shared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from aiosched.model.inputs import DeviceInputs, Int32Array
from aiosched.model.kv_pool import LayerAttention, PagedKV, head_index

# Below this length, padding a decode sequence costs less than another batch.
SHORT = 128


@dataclass(frozen=True, slots=True, eq=False)
class _Reach:
    """What some queries see: rows of the pool ``[b, kv_heads, length]``, and the additive mask
    ``[b, 1, 1, queries or 1, length]``, ``None`` if they see all of it."""

    index: torch.Tensor | None  # None: just the tokens of this step, in order
    mask: torch.Tensor | None
    causal: bool = False  # lower triangle, queries and keys the same tokens


class PagedAttention:
    """Attention over the pages of one step.

    Args:
        layers: of the model.
        inputs: of the step.
        kv: the pool. Its dtype is that of the queries.
    """

    def __init__(self, layers: Sequence[LayerAttention], inputs: DeviceInputs, kv: PagedKV) -> None:
        host = inputs.host
        self._layers = layers
        self._inputs = inputs
        self._kv = kv
        self._dtype = kv.keys[0].dtype
        self._groups = decode_groups(host.seq_lens[: host.num_decodes])
        self._extends = range(host.num_decodes, host.num_sequences)
        self._reaches: dict[tuple[str, int, int | None, int, bool], _Reach] = {}

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write ``key`` and ``value`` ``[t, kv_heads, dim]`` and attend with ``query``
        ``[t, heads, dim]``. Returns ``[t, heads, value_dim]``."""
        how = self._layers[layer]
        self._kv.write(layer, self._inputs.slots, key, value)
        output = query.new_empty(*query.shape[:2], how.value_dim)
        for number, group in enumerate(self._groups):
            reach = self._decode_reach(number, how)
            assert reach.index is not None
            keys, values = self._kv.read(layer, reach.index)
            rows = slice(len(group)) if len(self._groups) == 1 else self._rows(group)
            attended = _attend(query[rows].unsqueeze(2), keys, values, reach, how, sinks)
            output[rows] = attended.squeeze(2)
        starts = self._inputs.host.query_start
        for sequence in self._extends:
            tokens = slice(int(starts[sequence]), int(starts[sequence + 1]))
            reach = self._extend_reach(sequence, how)
            if reach.index is None:
                keys = key[tokens].transpose(0, 1).unsqueeze(0)
                values = value[tokens].transpose(0, 1).unsqueeze(0)
            else:
                keys, values = self._kv.read(layer, reach.index)
            queries = query[tokens].transpose(0, 1).unsqueeze(0)
            attended = _attend(queries, keys, values, reach, how, sinks)
            output[tokens] = attended.squeeze(0).transpose(0, 1)
        return output

    def _rows(self, group: list[int]) -> torch.Tensor:
        return torch.tensor(group, device=self._inputs.slots.device)

    def _decode_reach(self, number: int, how: LayerAttention) -> _Reach:
        key = ("decode", number, how.window, how.num_kv_heads, False)
        if (reach := self._reaches.get(key)) is not None:
            return reach
        group = self._groups[number]
        lengths = self._inputs.host.seq_lens[group]
        span = int(lengths.max())
        if how.window is not None:
            span = min(span, how.window)
        rows = self._rows(group)
        device = rows.device
        # Right-aligned: the last column is each sequence's newest token. Columns before its first
        # token read that token again rather than foreign memory, where a NaN might lie: a masked
        # NaN is still NaN once multiplied by its weight of 0.
        positions = torch.arange(-span, 0, device=device) + self._inputs.seq_lens[rows, None].long()
        mask = None
        if int(lengths.min()) < span:
            mask = self._additive(positions >= 0)[:, None, None, None, :]
        slots = self._slots(self._inputs.page_tables[rows], positions.clamp_(min=0))
        reach = _Reach(head_index(slots, how.num_kv_heads), mask)
        return self._reaches.setdefault(key, reach)

    def _extend_reach(self, sequence: int, how: LayerAttention) -> _Reach:
        explicit = _is_explicit(how)
        key = ("extend", sequence, how.window, how.num_kv_heads, explicit)
        if (reach := self._reaches.get(key)) is not None:
            return reach
        host = self._inputs.host
        length = int(host.seq_lens[sequence])
        queries = int(host.query_start[sequence + 1] - host.query_start[sequence])
        prefix = length - queries
        windowed = how.window is not None and how.window < length
        device = self._inputs.slots.device
        if prefix == 0 and not windowed and not explicit:
            return self._reaches.setdefault(key, _Reach(None, None, causal=True))
        first = max(0, prefix - how.window + 1) if how.window is not None else 0
        seen = torch.arange(first, length, device=device)
        asking = torch.arange(prefix, length, device=device)[:, None]
        visible = seen <= asking
        if how.window is not None:
            visible &= seen > asking - how.window
        mask = self._additive(visible)[None, None, None]
        index = None
        if prefix > 0:
            table = self._inputs.page_tables[sequence : sequence + 1]
            index = head_index(self._slots(table, seen[None]), how.num_kv_heads)
        return self._reaches.setdefault(key, _Reach(index, mask))

    def _slots(self, page_tables: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Where the tokens at ``positions`` ``[b, length]`` of each sequence lie."""
        size = self._kv.page_size
        pages = page_tables.gather(1, positions // size).long()
        return pages * size + positions % size

    def _additive(self, visible: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros(visible.shape, dtype=self._dtype, device=visible.device)
        return mask.masked_fill_(~visible, float("-inf"))


def decode_groups(seq_lens: Int32Array) -> list[list[int]]:
    """Indices of ``seq_lens`` in groups whose lengths differ by less than a factor of two.

    One long sequence among many short ones would otherwise make each of them as long as itself.
    """
    groups: list[list[int]] = []
    longest = 0
    for index in sorted(range(len(seq_lens)), key=lambda index: -int(seq_lens[index])):
        length = int(seq_lens[index])
        if groups and (longest <= SHORT or 2 * length > longest):
            groups[-1].append(index)
        else:
            groups.append([index])
            longest = length
    for group in groups:
        group.sort()
    return groups


def _is_explicit(how: LayerAttention) -> bool:
    """Whether torch's fused attention cannot do it."""
    return how.softcap is not None or how.sinks


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    reach: _Reach,
    how: LayerAttention,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """``query`` ``[b, heads, s, dim]`` over ``key``, ``value`` ``[b, kv_heads, length, dim]``."""
    batch, heads, s, _ = query.shape
    kv_heads = key.shape[1]
    if s == 1 and query.dtype == torch.float32 and query.device.type == "cpu":
        # Measured on CPUs: in float32, decoding takes half as long as two plain matmuls.
        return _attend_explicitly(query, key, value, reach, how, sinks)
    if _is_explicit(how):
        return _attend_explicitly(query, key, value, reach, how, sinks)
    if s == 1:
        # The query heads of a KV head become its queries: the same sums without repeating K and V.
        packed = query.view(batch, kv_heads, heads // kv_heads, -1)
        mask = None if reach.mask is None else reach.mask[:, 0]
        attended = scaled_dot_product_attention(packed, key, value, mask, scale=how.scaling)
        return attended.reshape(batch, heads, 1, -1)
    return scaled_dot_product_attention(
        query,
        key,
        value,
        None if reach.mask is None else reach.mask[:, 0],
        is_causal=reach.causal,
        scale=how.scaling,
        enable_gqa=heads != kv_heads,
    )


def _attend_explicitly(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    reach: _Reach,
    how: LayerAttention,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    batch, heads, s, dim = query.shape
    kv_heads, length = key.shape[1:3]
    share = heads // kv_heads
    grouped = query.reshape(batch, kv_heads, share * s, dim) * how.scaling
    scores = (grouped @ key.transpose(2, 3)).view(batch, kv_heads, share, s, length)
    if how.softcap is not None:
        scores = torch.tanh(scores / how.softcap) * how.softcap
    if reach.mask is not None:
        scores = scores + reach.mask
    if sinks is not None:
        column = sinks.view(1, kv_heads, share, 1, 1).to(scores.dtype)
        scores = torch.cat((scores, column.expand(batch, -1, -1, s, 1)), dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(value.dtype)
    if sinks is not None:
        weights = weights[..., :-1]
    attended = weights.reshape(batch, kv_heads, share * s, length) @ value
    return attended.reshape(batch, heads, s, -1)
