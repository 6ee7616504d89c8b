"""Weights of linear layers in few bits: what is stored, and what it stands for."""

from __future__ import annotations

from dataclasses import dataclass

import torch

GROUP = 32
"""Weights along a row that share an int4 scale and minimum: a block of GGUF's Q4_1. One that uses
both ends of its scale, as the usual quantizer makes them, comes out as it was."""


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """The weights of a linear layer, row by row.

    Attributes:
        rows: ``[outputs, inputs]`` in a float dtype; int8; or uint8, one of 16 numbers in each.
        scale: what rows of integers are to be multiplied with: of int8 float32 ``[outputs]``, of
            uint8 float16 ``[outputs, inputs / GROUP]``.
        minimum: of uint8: what is then added, as ``scale``.
        bias: ``[outputs]``, if the layer has one.
    """

    rows: torch.Tensor
    scale: torch.Tensor | None = None
    minimum: torch.Tensor | None = None
    bias: torch.Tensor | None = None

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        """The rows in a float dtype."""
        if self.scale is None:
            return self.rows.to(dtype)
        if self.minimum is None:
            return (self.rows.float() * self.scale[:, None]).to(dtype)
        groups = _in_groups(self.rows)
        groups.mul_(self.scale.float()[..., None]).add_(self.minimum.float()[..., None])
        return groups.flatten(1).to(dtype)


def in_int8(rows: torch.Tensor, bias: torch.Tensor | None) -> Weights:
    """Int8 weights, symmetric, one scale for each row: its largest magnitude is 127."""
    rows = rows.float()
    scale = rows.abs().amax(1).clamp_(min=torch.finfo(torch.float32).tiny) / 127.0
    return Weights((rows / scale[:, None]).round_().to(torch.int8), scale, bias=bias)


def in_int4(rows: torch.Tensor, bias: torch.Tensor | None) -> Weights:
    """Weights in 4 bits: each group's smallest is 0 and its largest 15.

    ``inputs`` must be a multiple of ``GROUP``. A group of a Q4_1 file is kept as it is if it has
    both 0 and 15; others get a finer scale, and each weight is off by half a step of it at most.
    """
    groups = _in_groups(rows)
    low, high = groups.aminmax(dim=2)
    minimum = low.half()
    scale = ((high - low) / 15.0).half()
    steps = scale.float().clamp_(min=2.0**-24)
    numbers = (groups - minimum.float()[..., None]).div_(steps[..., None]).round_().clamp_(0, 15)
    return Weights(numbers.nan_to_num_().to(torch.uint8).flatten(1), scale, minimum, bias)


def _in_groups(rows: torch.Tensor) -> torch.Tensor:
    return rows.float().view(len(rows), -1, GROUP)
