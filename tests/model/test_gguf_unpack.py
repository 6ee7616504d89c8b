"""Blocks are unpacked to the bit as the gguf package does it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from aiosched.model.gguf_unpack import unpack

TYPES = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q8_0"]


@pytest.mark.parametrize("name", TYPES)
def test_every_type_equals_the_package(name: str) -> None:
    kind = GGMLQuantizationType[name]
    values = np.random.default_rng(0).normal(size=(6, 96)).astype(np.float32)
    packed = quantize(values, kind)
    expected = dequantize(packed, kind).astype(np.float32)

    flat = np.ascontiguousarray(packed).view(np.uint8).reshape(-1)
    followed = np.concatenate([flat, np.zeros(7, np.uint8)])  # by the next tensor
    np.testing.assert_array_equal(unpack(followed, (6, 96), int(kind)).numpy(), expected)
    with pytest.raises(ValueError):
        unpack(flat[:-1], (6, 96), int(kind))


@pytest.mark.parametrize("name", TYPES)
def test_torch_s_default_dtype_plays_no_part(name: str) -> None:
    kind = GGMLQuantizationType[name]
    values = np.random.default_rng(0).normal(size=(2, 32)).astype(np.float32)
    packed = np.ascontiguousarray(quantize(values, kind)).view(np.uint8).reshape(-1)
    expected = unpack(packed, (2, 32), int(kind))
    torch.set_default_dtype(torch.bfloat16)
    try:
        unpacked = unpack(packed, (2, 32), int(kind))
    finally:
        torch.set_default_dtype(torch.float32)
    assert unpacked.dtype == torch.float32
    assert torch.equal(unpacked, expected)


def test_rows_that_are_no_whole_blocks_and_unknown_types_are_errors() -> None:
    with pytest.raises(ValueError, match="33 values in blocks of 32"):
        unpack(np.zeros(4096, np.uint8), (2, 33), int(GGMLQuantizationType.Q8_0))
    with pytest.raises(ValueError, match="33 values in blocks of 32"):  # by the package
        unpack(np.zeros(4096, np.uint8), (2, 33), int(GGMLQuantizationType.Q5_0))
    with pytest.raises(ValueError):
        unpack(np.zeros(4096, np.uint8), (2, 32), 999)
