"""Linear layers on the CPU, their weights laid out once for the kernels that read them."""

from __future__ import annotations

from typing import Protocol

import torch
from torch.nn.functional import linear

from aiosched.model.weights import Weights

FEW_ROWS = 4
"""Up to so many rows int8 weights are read as they are: beyond, products in bfloat16 win, although
their weights are twice as large (measured with AMX)."""


class Linear(Protocol):
    """``y = x W^T + b`` over rows ``[n, inputs]``."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``[n, outputs]``."""

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """``residual + y``, a new tensor ``[n, outputs]``."""


class PlainLinear:
    """torch's own, with the weight as it is."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = weight
        self._transposed = weight.t()
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self._weight, self._bias)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        if self._bias is None:
            return torch.addmm(residual, x, self._transposed)
        return linear(x, self._weight, self._bias).add_(residual)


class PackedLinear:
    """oneDNN's, the weight in its own blocked layout: torch repacks a plain one at every call."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight)
        self._bias = bias
        self._unary = torch.ops.mkldnn._linear_pointwise.default
        self._binary = torch.ops.mkldnn._linear_pointwise.binary

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self._unary(x, self._weight, self._bias, "none", [], "")
        return y

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self._binary(x, residual, self._weight, self._bias, "add")
        return y


class Int8Linear:
    """int8 weights for few rows, the same numbers in bfloat16 for many."""

    def __init__(self, weights: Weights) -> None:
        assert weights.scale is not None
        self._rows = weights.rows
        self._scale = weights.scale.bfloat16()
        self._bias = weights.bias
        self._many = _float_linear(weights.dequantized(torch.bfloat16), weights.bias)
        self._few = torch.ops.aten._weight_int8pack_mm.default

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) > FEW_ROWS:
            return self._many(x)
        y: torch.Tensor = self._few(x, self._rows, self._scale)
        return y if self._bias is None else y.add_(self._bias)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return self._many.add(x, residual) if len(x) > FEW_ROWS else self(x).add_(residual)


def has_bfloat16_dot_products() -> bool:
    """Whether this CPU multiplies in bfloat16 itself (AVX512_BF16 or AMX). Elsewhere bfloat16
    is slower than float32."""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def make_linear(weights: Weights, dtype: torch.dtype, few_rows: bool = True) -> Linear:
    """The fastest layer for activations in ``dtype``.

    Args:
        few_rows: whether it will be asked for few rows at all; weights of integers are not kept
            for many.
    """
    if weights.rows.dtype == torch.int8 and dtype == torch.bfloat16 and few_rows:
        return Int8Linear(weights)
    return _float_linear(weights.dequantized(dtype), weights.bias)


def _float_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    if (
        weight.dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    ):
        return PackedLinear(weight, bias)
    return PlainLinear(weight, bias)
