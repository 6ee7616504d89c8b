"""Part ``equality``: FlashInfer's attention against plain torch's, on the same weights.

Logits of prompts of different lengths, then of a decode step over their pages. Both compute in the
model's dtype, and round differently: what must agree is the likeliest token, wherever it leads by
more than the two differ.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from importlib.util import find_spec
from typing import Any

import torch

from aiosched.bench.gpu.bare import PAGE_SIZE
from aiosched.bench.gpu.decode_step import decode_step, extend_step, on_device
from aiosched.bench.gpu.settings import Settings
from aiosched.model.loader import load_model
from aiosched.model.transformers_model import TransformersModel

LENGTHS = (1, 15, 16, 17, 100, 257)
DECODES, DECODE_LENGTH = 8, 100


async def measure(settings: Settings) -> AsyncIterator[dict[str, Any]]:
    """A row for each kind of step: ``max_difference logits_std same_token equal``."""
    if not settings.on_cuda or find_spec("flashinfer") is None:
        yield {"skipped": "FlashInfer needs a GPU and the extra `cuda`"}
        return
    from aiosched.model.flashinfer_attention import FlashInferModel

    model = load_model(settings.model, dtype=settings.dtype, device=settings.device)
    if not isinstance(model, FlashInferModel):
        yield {"skipped": f"FlashInfer does not serve {settings.model} in {settings.dtype}"}
        return
    steps = {
        "extend": extend_step(list(LENGTHS), PAGE_SIZE),
        # Reads what the step before it has left in the pages of both pools.
        "decode": decode_step(DECODES, DECODE_LENGTH, PAGE_SIZE),
    }
    pages = max(int(step.page_tables.max()) for step in steps.values())
    ours = model.make_kv(pages, PAGE_SIZE)
    plain = TransformersModel.make_kv(model, pages, PAGE_SIZE)
    for name, step in steps.items():
        inputs = on_device(step, settings.device)
        with torch.inference_mode():
            model.plan(inputs, ours)
            found = model.forward(inputs, ours).float()
            expected = TransformersModel.forward(model, inputs, plain).float()
        yield {"step": name} | compare(found, expected)


def compare(found: torch.Tensor, expected: torch.Tensor) -> dict[str, Any]:
    """How two sets of logits ``[n, vocab]`` differ; ``equal`` if only by rounding."""
    difference = (found - expected).abs().max().item()
    std = expected.std().item()
    two = expected.topk(2).values
    certain = two[:, 0] - two[:, 1] > 2 * difference
    same = found.argmax(-1) == expected.argmax(-1)
    return {
        "max_difference": difference,
        "logits_std": std,
        "same_token": f"{int(same.sum())} of {len(same)}",
        "equal": bool(same[certain].all()) and difference < 0.1 * std,
    }
