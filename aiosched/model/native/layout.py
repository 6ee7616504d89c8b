"""How weights lie in memory for the kernels of ``products.h`` and ``int4.h``."""

from __future__ import annotations

import torch

from aiosched.model.weights import GROUP

_OUTPUTS = 16  # that lie together
_TILE_BYTES = 64  # of one output's weights in a tile


def in_tiles(rows: torch.Tensor) -> torch.Tensor:
    """Weights ``[n, k]`` as AMX multiplies with them: ``[n / 16, k bytes / 64, 16, 16, 4 bytes]``,
    the four bytes of one output together, padded with zeros along ``k``."""
    n, k = rows.shape
    numbers = _TILE_BYTES // rows.itemsize
    if k % numbers:
        rows = torch.nn.functional.pad(rows, (0, numbers - k % numbers))
    tiles = rows.view(n // _OUTPUTS, _OUTPUTS, -1, 16, numbers // 16)
    return tiles.permute(0, 2, 3, 1, 4).contiguous()


def in_groups(numbers: torch.Tensor, scale: torch.Tensor, minimum: torch.Tensor) -> torch.Tensor:
    """Int4 weights, uint8 ``[n, k]`` and float16 ``[n, k / 32]`` twice, as bytes
    ``[n / 16, k / 32, 320]``: what 16 outputs have of a group, in the order of ``int4.h``."""
    n = len(numbers)
    split = numbers.view(n // _OUTPUTS, _OUTPUTS, -1, GROUP // 8, 2, 4)
    pairs = split[..., 0, :] | split[..., 1, :] << 4
    parts = [pairs.permute(0, 2, 3, 1, 4).flatten(2)]
    for factors in (scale, minimum):
        together = factors.view(n // _OUTPUTS, _OUTPUTS, -1).transpose(1, 2).contiguous()
        parts.append(together.view(torch.uint8))
    return torch.cat(parts, dim=2)
