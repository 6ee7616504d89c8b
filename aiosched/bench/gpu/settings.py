"""What ``aiosched bench gpu`` measures: its parts, and what each of them is told."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

MODELS = ("dummy:llama-3.1-8b", "dummy:qwen3-0.6b")
_TINY = "hidden_size=64&intermediate_size=128&num_hidden_layers=2&vocab_size=500"
TINY_MODELS = (
    f"dummy:llama?{_TINY}&num_attention_heads=4&num_key_value_heads=2",
    f"dummy:qwen3?{_TINY}&num_attention_heads=4&num_key_value_heads=2&head_dim=16",
)
TIME_LIMIT = 520.0
"""Seconds for all parts: under nine minutes, the starts of processes included."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What a part is told.

    Attributes:
        device: ``cuda``, ``cuda:N`` or ``cpu``.
        model: of the parts that have one.
        dtype: of weights and KV.
        batches: sequences that decode at once.
        prompt_tokens: of each sequence.
        steps: decode steps in one measured stretch.
        rounds: stretches of each loop, in turn.
        repeats: of what takes microseconds.
        copy_bytes: of the tensor that measures the bandwidth.
    """

    device: str = "cuda"
    model: str = ""
    dtype: str = "bfloat16"
    batches: tuple[int, ...] = (1, 8, 64, 256)
    prompt_tokens: int = 64
    steps: int = 64
    rounds: int = 3
    repeats: int = 200
    copy_bytes: int = 2**32

    @property
    def on_cuda(self) -> bool:
        return self.device.startswith("cuda")

    @property
    def index(self) -> int:
        """Of the GPU."""
        return int(self.device.partition(":")[2] or 0)


TINY: Mapping[str, Any] = {
    "dtype": "float32",
    "batches": (1, 3),
    "prompt_tokens": 8,
    "steps": 4,
    "rounds": 1,
    "repeats": 5,
    "copy_bytes": 2**20,
}


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """One part, which runs in a process of its own.

    Attributes:
        name: also of its module, with underscores.
        seconds: that it may take; what it has measured by then stands.
        per_model: it runs once for each model.
    """

    name: str
    seconds: float
    per_model: bool = False


PARTS = (
    Part(name="bandwidth", seconds=40),
    Part(name="wake-up", seconds=40),
    # Compiles FlashInfer's kernels where they are not cached, so that the steps find them.
    Part(name="equality", seconds=120),
    Part(name="step", seconds=150, per_model=True),
    Part(name="continuous-batching", seconds=75, per_model=True),
)
