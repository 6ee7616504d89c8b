"""What an engine's settings come to on the machine and for the model found."""

from __future__ import annotations

from aiosched.config import EngineConfig
from aiosched.errors import InvalidConfig
from aiosched.model.inputs import Model
from aiosched.scheduler.scheduler import Limits

CPU_KV_BYTES = 2 * 2**30
"""KV memory that an engine takes on the CPU if it is not told."""

CUDA_KV_SHARE = 0.85
"""Share of the GPU memory left by the weights that the KV cache takes if it is not told."""


def resolve_limits(config: EngineConfig, model: Model, free_device_bytes: int | None) -> Limits:
    """Fill in every ``None`` of ``config`` for ``model``.

    ``free_device_bytes``: memory of the GPU that is free after the model was loaded; ``None`` on
    the CPU.

    Raises:
        InvalidConfig: the settings contradict the model or each other.
    """
    max_model_len = model.max_model_len
    if config.max_model_len is not None:
        if config.max_model_len > model.max_model_len:
            raise InvalidConfig(
                "max_model_len", config.max_model_len, f"at most the model's {model.max_model_len}"
            )
        max_model_len = config.max_model_len
    kv_tokens = config.kv_tokens
    if kv_tokens is None:
        memory = CPU_KV_BYTES
        if free_device_bytes is not None:
            memory = int(free_device_bytes * CUDA_KV_SHARE)
        by_memory = memory // max(model.kv_bytes_per_token(), 1)
        kv_tokens = min(by_memory, config.max_running_requests * max_model_len)
    num_pages = kv_tokens // config.page_size
    if num_pages < 1:
        raise InvalidConfig("kv_tokens", kv_tokens, f"at least one page of {config.page_size}")
    batch_tokens = config.max_batch_tokens
    if batch_tokens is None:
        batch_tokens = config.prefill_chunk_tokens + config.max_running_requests
    return Limits(
        num_pages=num_pages,
        page_size=config.page_size,
        max_model_len=max_model_len,
        max_running=config.max_running_requests,
        chunk_tokens=config.prefill_chunk_tokens,
        batch_tokens=batch_tokens,
        depth=config.overlap_depth,
        prefix_cache=config.prefix_cache,
        check=config.debug,
    )
