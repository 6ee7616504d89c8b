"""What an engine's settings come to on the machine and for the model found."""

from __future__ import annotations

from aiosched.config import EngineConfig
from aiosched.errors import InvalidConfig
from aiosched.host_memory import available_bytes
from aiosched.model.inputs import Model
from aiosched.scheduler.depth import deepest
from aiosched.scheduler.scheduler import Limits

CPU_KV_BYTES = 2 * 2**30
CPU_KV_SHARE = 0.25
"""KV memory that an engine takes on the CPU if it is not told: this share of what is available
once the model is loaded, and at most so many bytes."""

CUDA_KV_SHARE = 0.85
CUDA_RESERVE = 3 * 2**29
"""KV memory that it takes of a GPU: this share of what the weights and the reserve leave.

The reserve, 1.5 GiB, does not grow with the GPU. It is for a vocabulary of 150,000 and 256 running
requests: logits of every captured batch size (4,231 rows of two bytes per id: 1.2 GiB), and the
workspaces of FlashInfer (0.3 GiB). The share leaves the rest: activations of a prefill step, what
the sampler sorts (about 16 bytes for each logit: 0.6 GiB), and torch's fragmentation. Of a GPU with
less than twice the reserve to spare, half counts as left.
"""


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
        if free_device_bytes is None:
            memory = cpu_kv_bytes(available_bytes())
        else:
            memory = cuda_kv_bytes(free_device_bytes)
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
        depth=deepest(config.overlap_depth),
        prefix_cache=config.prefix_cache,
        check=config.debug,
    )


def cpu_kv_bytes(available: int | None) -> int:
    """KV memory on a machine with so many bytes available, ``None``: nobody knows."""
    return CPU_KV_BYTES if available is None else min(CPU_KV_BYTES, int(available * CPU_KV_SHARE))


def cuda_kv_bytes(free: int) -> int:
    """KV memory on a GPU with so many bytes free after the model was loaded."""
    return int(max(free - CUDA_RESERVE, free // 2) * CUDA_KV_SHARE)
