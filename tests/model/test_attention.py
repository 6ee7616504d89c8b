"""Paged attention equals attention over the whole sequence, whatever the pages and the batch."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_steps import PagedSequences

from aiosched.model.attention import PagedAttention, decode_groups
from aiosched.model.kv_pool import LayerAttention, PagedKV

PLAIN = LayerAttention(num_heads=4, num_kv_heads=2, key_dim=8, value_dim=8, scaling=0.3)
KINDS = {
    "plain": PLAIN,
    "one KV head": LayerAttention(3, 1, 8, 8, 0.3),
    "no sharing": LayerAttention(2, 2, 8, 8, 0.3),
    "sliding window": LayerAttention(4, 2, 8, 8, 0.3, window=5),
    "window of one": LayerAttention(4, 2, 8, 8, 0.3, window=1),
    "softcap": LayerAttention(4, 2, 8, 8, 0.9, softcap=2.0),
    "sinks and window": LayerAttention(4, 2, 8, 8, 0.3, window=7, sinks=True),
    "narrow values": LayerAttention(4, 2, 8, 6, 0.3),
}


def whole_sequence(
    how: LayerAttention,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of all tokens of one sequence ``[length, heads, dim]``, in float64."""
    length = len(query)
    share = how.num_heads // how.num_kv_heads
    output = torch.zeros(length, how.num_heads, how.value_dim, dtype=torch.float64)
    for head in range(how.num_heads):
        for position in range(length):
            first = 0 if how.window is None else max(0, position - how.window + 1)
            seen = slice(first, position + 1)
            scores = key[seen, head // share].double() @ query[position, head].double()
            scores = scores * how.scaling
            if how.softcap is not None:
                scores = how.softcap * torch.tanh(scores / how.softcap)
            weights = torch.exp(scores)
            total = weights.sum() + (0 if sinks is None else math.exp(float(sinks[head])))
            output[position, head] = (weights / total) @ value[seen, head // share].double()
    return output


class Sequence:
    """Random queries, keys and values, and how many of them have been run."""

    def __init__(self, how: LayerAttention, length: int, generator: torch.Generator) -> None:
        def random(heads: int, dim: int) -> torch.Tensor:
            return torch.randn(length, heads, dim, generator=generator)

        self.query = random(how.num_heads, how.key_dim)
        self.key = random(how.num_kv_heads, how.key_dim)
        self.value = random(how.num_kv_heads, how.value_dim)
        self.done = 0

    def take(self, count: int) -> slice:
        tokens = slice(self.done, self.done + count)
        self.done += count
        return tokens


def run(
    how: LayerAttention,
    page_size: int,
    steps: list[dict[str, int]],
    dtype: torch.dtype = torch.float32,
    garbage: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs of all steps, paged and expected. A step maps names to counts of tokens; sequences
    with one token that have run before decode."""
    generator = torch.Generator().manual_seed(3)
    lengths: dict[str, int] = {}
    for step in steps:
        for name, count in step.items():
            lengths[name] = lengths.get(name, 0) + count
    data = {name: Sequence(how, length, generator) for name, length in lengths.items()}
    sinks = torch.randn(how.num_heads, generator=generator) if how.sinks else None
    num_pages = sum(-(-length // page_size) for length in lengths.values())
    kv = PagedKV([how], num_pages, page_size, dtype, "cpu")
    for tensor in (*kv.keys, *kv.values):
        tensor.fill_(garbage)
    pages = PagedSequences(num_pages, page_size)
    paged, wanted = [], []
    for step in steps:
        decodes = {name: 0 for name, count in step.items() if count == 1 and data[name].done}
        extends = {name: [0] * count for name, count in step.items() if name not in decodes}
        inputs = pages.step(decodes, extends)
        tokens = {name: data[name].take(step[name]) for name in [*decodes, *extends]}

        def flat(what: str, tokens: dict[str, slice] = tokens) -> torch.Tensor:
            parts = [getattr(data[name], what)[place] for name, place in tokens.items()]
            return torch.cat(parts).to(dtype)

        attention = PagedAttention([how], inputs, kv)
        paged.append(attention.attend(0, flat("query"), flat("key"), flat("value"), sinks))
        for name, place in tokens.items():
            seq = data[name]
            seen = slice(0, place.stop)
            all_of_it = whole_sequence(how, seq.query[seen], seq.key[seen], seq.value[seen], sinks)
            wanted.append(all_of_it[place])
    return torch.cat(paged), torch.cat(wanted)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("kind", KINDS)
def test_chunked_prefill_and_decode_equal_attention_over_the_whole(
    kind: str, page_size: int
) -> None:
    steps = [
        {"a": 3, "b": 17},
        {"a": 1, "b": 9, "c": 1},
        {"a": 1, "c": 1, "b": 4},
        {"a": 1, "b": 1, "c": 1},
    ]
    paged, wanted = run(KINDS[kind], page_size, steps)
    torch.testing.assert_close(paged.double(), wanted, rtol=1e-5, atol=1e-5)


@settings(max_examples=25, deadline=None)
@given(
    page_size=st.sampled_from([1, 4, 16]),
    window=st.sampled_from([None, 2, 11]),
    steps=st.lists(
        st.dictionaries(st.sampled_from("abcd"), st.integers(1, 12), min_size=1), min_size=1,
        max_size=5,
    ),
)  # fmt: skip
def test_any_schedule_equals_attention_over_the_whole(
    page_size: int, window: int | None, steps: list[dict[str, int]]
) -> None:
    paged, wanted = run(LayerAttention(4, 2, 8, 8, 0.3, window=window), page_size, steps)
    torch.testing.assert_close(paged.double(), wanted, rtol=1e-5, atol=1e-5)


def test_sequences_of_very_different_length_decode_in_one_step() -> None:
    steps = [{"long": 300, "short": 2, "middle": 140}, {"long": 1, "short": 1, "middle": 1}]
    paged, wanted = run(PLAIN, 16, steps)
    torch.testing.assert_close(paged.double(), wanted, rtol=1e-5, atol=1e-5)


def test_half_precision_takes_the_fused_path_to_the_same_values() -> None:
    steps = [{"a": 20, "b": 3}, {"a": 1, "b": 5}, {"a": 1, "b": 1}]
    paged, wanted = run(PLAIN, 16, steps, dtype=torch.bfloat16)
    torch.testing.assert_close(paged.double(), wanted, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_lies_in_foreign_memory_never_reaches_a_result(dtype: torch.dtype) -> None:
    steps = [{"a": 20, "b": 3}, {"a": 1, "b": 5}, {"a": 1, "b": 1}]
    paged, _ = run(KINDS["sliding window"], 16, steps, dtype, garbage=math.nan)
    assert torch.isfinite(paged).all()
    paged, _ = run(PLAIN, 16, steps, dtype, garbage=math.nan)
    assert torch.isfinite(paged).all()


def test_decode_groups_bound_the_padding() -> None:
    lengths = np.array([5000, 3, 40, 2600, 2400, 7, 900], np.int32)

    groups = decode_groups(lengths)

    assert sorted(index for group in groups for index in group) == list(range(len(lengths)))
    assert groups == [[0, 3], [4], [6], [1, 2, 5]]
    assert decode_groups(lengths[:0]) == []
