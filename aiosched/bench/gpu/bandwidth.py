"""Part ``bandwidth``: what the device's memory moves, by copying a large tensor within it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import torch

from aiosched.bench.gpu.settings import Settings
from aiosched.bench.gpu.timing import seconds_per_call


def copy_bandwidth(device: str, size: int) -> float:
    """Bytes a second, those read and those written both counted."""
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = seconds_per_call(lambda: target.copy_(source), device, calls=5)
    return 2 * size / seconds


async def measure(settings: Settings) -> AsyncIterator[dict[str, Any]]:
    """One row: ``gb_s``."""
    bandwidth = copy_bandwidth(settings.device, settings.copy_bytes)
    yield {"gb_s": bandwidth / 1e9}
