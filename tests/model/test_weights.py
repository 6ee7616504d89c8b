"""What weights in 4 bits stand for."""

from __future__ import annotations

import pytest
import torch

from aiosched.model.weights import GROUP, in_int4


def test_blocks_of_a_q4_1_file_that_use_both_ends_of_their_scale_come_out_as_they_were() -> None:
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randint(16, (64, 4, GROUP), generator=generator)
    numbers[..., 3], numbers[..., 20] = 0, 15  # the smallest and the largest of every block
    scale = (torch.rand(64, 4, 1, generator=generator) * 0.1).half()
    minimum = torch.randn(64, 4, 1, generator=generator).half()
    rows = (numbers * scale.float() + minimum.float()).flatten(1)

    weights = in_int4(rows, None)

    assert torch.equal(weights.rows, numbers.flatten(1).to(torch.uint8))
    assert torch.equal(weights.dequantized(torch.float32), rows)


def test_a_q4_1_block_without_both_ends_is_off_by_half_a_step_at_most() -> None:
    numbers = torch.tensor([2, 5, 13, 6] * (GROUP // 4))
    rows = (numbers * 0.25 - 1.0)[None]

    weights = in_int4(rows, None)

    assert (weights.rows.min(), weights.rows.max()) == (0, 15)
    error = (weights.dequantized(torch.float32) - rows).abs().max()
    assert 0 < error <= 11 / 15 * 0.25 / 2 * 1.02


def test_each_weight_is_off_by_half_a_step_at_most() -> None:
    rows = torch.randn(16, 8 * GROUP, generator=torch.Generator().manual_seed(0))
    error = (in_int4(rows, None).dequantized(torch.float32) - rows).abs().unflatten(1, (-1, GROUP))
    low, high = rows.unflatten(1, (-1, GROUP)).aminmax(dim=2)
    assert (error.amax(2) <= (high - low) / 30 * 1.02).all()


@pytest.mark.parametrize("value", [0.0, 0.5, -3.0])
def test_a_group_of_equal_weights_is_exact(value: float) -> None:
    rows = torch.full((16, GROUP), value)
    assert torch.equal(in_int4(rows, None).dequantized(torch.float32), rows)


def test_nan_makes_its_group_nan() -> None:
    rows = torch.ones(2, 2 * GROUP)
    rows[1, 5] = float("nan")
    nan = in_int4(rows, None).dequantized(torch.float32).isnan()
    assert nan[1, :GROUP].all() and nan.sum() == GROUP
