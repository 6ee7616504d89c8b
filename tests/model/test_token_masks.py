"""Masks of the sampler: the ids that a grammar leaves to a row, and to no other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aiosched.model.inputs import SamplingInputs, TokenMasks
from aiosched.model.sampler import Sampler
from aiosched.model.staging import stage_sampling


def masks_of(vocab: int, allowed: dict[int, Sequence[int]]) -> TokenMasks:
    bits = np.zeros((len(allowed), -(-vocab // 32)), np.uint32)
    for line, ids in zip(bits, allowed.values(), strict=True):
        for token in ids:
            line[token // 32] |= np.uint32(1 << token % 32)
    return TokenMasks(np.array([*allowed], np.int64), bits.view(np.int32))


def choose(logits: np.ndarray, **fields: object) -> list[int]:
    m, vocab = logits.shape
    inputs = stage_sampling(SamplingInputs(**fields), vocab, torch.from_numpy)
    rows = torch.arange(1, m + 1)
    return Sampler(vocab, m, "cpu").sample(torch.from_numpy(logits), rows, inputs).tokens.tolist()


@given(data=st.data(), vocab=st.sampled_from([1, 7, 31, 32, 33, 64, 100, 513]))
def test_a_row_chooses_the_likeliest_of_the_ids_that_its_mask_leaves(
    data: st.DataObject, vocab: int
) -> None:
    logits = np.random.default_rng(vocab).normal(0, 3, (4, vocab)).astype(np.float32)
    rows = data.draw(st.sets(st.integers(0, 3)))
    some = st.sets(st.integers(0, vocab - 1), min_size=1)
    allowed = {row: sorted(data.draw(some)) for row in sorted(rows)}
    expected = logits.argmax(1).tolist()
    for row, ids in allowed.items():
        expected[row] = ids[int(logits[row, ids].argmax())]
    assert choose(logits, masks=masks_of(vocab, allowed)) == expected


def test_a_draw_follows_the_distribution_among_the_ids_that_are_left() -> None:
    count, vocab, left = 4_000, 40, [3, 31, 32, 39]
    logits = np.zeros((count, vocab), np.float32)
    tokens = choose(
        logits,
        masks=masks_of(vocab, dict.fromkeys(range(count), left)),
        temperature=np.ones(count, np.float32),
        uniform=((np.arange(count) + 0.5) / count).astype(np.float32),
    )
    assert [tokens.count(id) for id in left] == [1_000] * 4


def test_a_mask_and_a_ban_hold_together() -> None:
    bans = {
        "bias_index": np.array([0]),
        "bias_ids": np.array([5]),
        "bias_values": np.array([-np.inf], np.float32),
    }
    logits = np.arange(8, dtype=np.float32)[None]
    assert choose(logits, masks=masks_of(8, {0: [2, 5]}), **bans) == [2]


def test_a_mask_that_leaves_nothing_gives_minus_one_and_its_neighbour_a_token() -> None:
    logits = np.array([[1, 2, 3], [1, 2, 3]], np.float32)
    assert choose(logits, masks=masks_of(3, {0: []})) == [-1, 2]


def test_bits_behind_the_vocabulary_do_not_matter() -> None:
    bits = np.full((1, 1), -1, np.int32)
    logits = np.arange(5, dtype=np.float32)[None]
    assert choose(logits, masks=TokenMasks(np.array([0]), bits)) == [4]


@pytest.mark.parametrize("shape", [(1, 1), (1, 3), (2, 2)])
def test_masks_of_another_vocabulary_or_number_of_rows_are_refused(shape: tuple[int, int]) -> None:
    masks = TokenMasks(np.array([0]), np.zeros(shape, np.int32))
    with pytest.raises(ValueError, match=r"shape .* expected"):
        stage_sampling(SamplingInputs(masks=masks), 40, torch.from_numpy)
