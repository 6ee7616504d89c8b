"""From the packed blocks of a GGUF tensor to numbers.

The block types that small models come in are unpacked here, several times as fast as by the gguf
package, whose code serves all others. Layouts:
https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]


def unpack(packed: Bytes, shape: tuple[int, ...], ggml_type: int) -> torch.Tensor:
    """The tensor in float32, with memory of its own.

    Args:
        packed: from its first byte on; may be longer than the tensor.
        shape: slowest dimension first.
        ggml_type: number of its block type.

    Raises:
        ValueError: no such type, or ``packed`` is too short for the shape.
        NotImplementedError: the gguf package cannot unpack the type.
    """
    known = _TYPES.get(ggml_type)
    if known is None:
        return _by_package(packed, shape, ggml_type)
    values, block_bytes, unpack_blocks = known
    if shape[-1] % values:
        raise ValueError(f"rows of {shape[-1]} values in blocks of {values}")
    count = math.prod(shape) // values
    blocks = packed[: count * block_bytes]
    if len(blocks) < count * block_bytes:
        raise ValueError("it ends too early")
    # A copy in memory: the file is mapped read-only, which torch does not know.
    return unpack_blocks(torch.from_numpy(np.array(blocks)).view(count, block_bytes)).view(shape)


def _floats(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda blocks: blocks.view(dtype).float()


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    scale = _half(blocks, 0)
    return blocks[:, 2:].view(torch.int8).float().mul_(scale)


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    return _nibbles(blocks[:, 2:]).sub_(8.0).mul_(_half(blocks, 0))


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    # Product and sum rounded apart, as the reference has it.
    return _nibbles(blocks[:, 4:]).mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _half(blocks: torch.Tensor, start: int) -> torch.Tensor:
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def _nibbles(pairs: torch.Tensor) -> torch.Tensor:
    """Low halves first, then high halves, ``[n, 16]`` bytes to ``[n, 32]`` numbers."""
    values = torch.empty(len(pairs), 32, dtype=torch.float32)
    values[:, :16] = pairs & 15
    values[:, 16:] = pairs >> 4
    return values


_TYPES: dict[int, tuple[int, int, Callable[[torch.Tensor], torch.Tensor]]] = {
    # type: (values in a block, bytes of a block, from blocks to numbers)
    0: (1, 4, _floats(torch.float32)),
    1: (1, 2, _floats(torch.float16)),
    2: (32, 18, _q4_0),
    3: (32, 20, _q4_1),
    8: (32, 34, _q8_0),
    30: (1, 2, _floats(torch.bfloat16)),
}


def _by_package(packed: Bytes, shape: tuple[int, ...], ggml_type: int) -> torch.Tensor:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    kind = GGMLQuantizationType(ggml_type)
    values, block_bytes = GGML_QUANT_SIZES[kind]
    if shape[-1] % values:
        raise ValueError(f"rows of {shape[-1]} values in blocks of {values}")
    row_bytes = shape[-1] // values * block_bytes
    rows = np.asarray(packed[: math.prod(shape[:-1]) * row_bytes]).reshape(*shape[:-1], row_bytes)
    floats: NDArray[Any] = dequantize(rows, kind).astype(np.float32, copy=False)
    return torch.from_numpy(np.array(floats, copy=not floats.flags.owndata)).view(shape)
