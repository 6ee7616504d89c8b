"""Part ``continuous-batching``: transformers' own, on weights of the same shape."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import transformers
from transformers import GenerationConfig

from aiosched.bench.gpu.settings import Settings
from aiosched.model.dummy import load_dummy
from aiosched.model.loader import DTYPES

PAGE_SIZE = 32


async def measure(settings: Settings) -> AsyncIterator[dict[str, Any]]:
    """A row for each batch: ``batch step_ms step_low_ms step_high_ms tok_s``.

    A step is the time between two tokens of a sequence while all of the batch decode, its quartiles
    taken over all of them.
    """
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    name = settings.model.removeprefix("dummy:")
    model: Any = load_dummy(name, DTYPES[settings.dtype], settings.device)[0]
    model.eval().set_attn_implementation("sdpa")
    for batch in settings.batches:
        times = _token_times(model, settings, batch)
        low, middle, high = np.percentile(step_seconds(times), [25, 50, 75]).tolist()
        yield {
            "batch": batch,
            "loop": "transformers",
            "step_ms": middle * 1e3,
            "step_low_ms": low * 1e3,
            "step_high_ms": high * 1e3,
            "tok_s": batch / middle,
        }


def step_seconds(times: Sequence[Sequence[float]]) -> list[float]:
    """Seconds from token to token while every sequence decodes.

    Args:
        times: of each sequence's tokens, in order.

    Raises:
        ValueError: they never decode together.
    """
    begin = max(sequence[0] for sequence in times)
    end = min(sequence[-1] for sequence in times)
    within = [[at for at in sequence if begin <= at <= end] for sequence in times]
    steps = [after - before for ats in within for before, after in pairwise(ats)]
    if not steps:
        raise ValueError("the sequences never decoded at once")
    return steps


@torch.inference_mode()
def _token_times(model: Any, settings: Settings, batch: int) -> list[list[float]]:
    from transformers import ContinuousBatchingConfig

    chunk = max(512, settings.prompt_tokens)
    new_tokens = settings.steps + 2 * math.ceil(batch * settings.prompt_tokens / chunk) + 8
    prompts = [[2 + (7 * n + i) % 89 for i in range(settings.prompt_tokens)] for n in range(batch)]
    config = ContinuousBatchingConfig(allow_block_sharing=False)
    if not settings.on_cuda:  # where it would take most of the machine's memory for its KV cache
        config.page_size = PAGE_SIZE
        config.num_blocks = batch * (1 + math.ceil((len(prompts[0]) + new_tokens) / PAGE_SIZE))
        config.max_batch_tokens = chunk + batch
    outputs = model.generate_batch(
        prompts,
        generation_config=GenerationConfig(  # type: ignore[no-untyped-call]
            max_new_tokens=new_tokens, do_sample=False, pad_token_id=0, eos_token_id=None
        ),
        continuous_batching_config=config,
        record_timestamps=True,
        progress_bar=False,
    )
    if len(outputs) < batch:
        raise RuntimeError(f"{batch - len(outputs)} of {batch} sequences were not answered")
    return [output.timestamps for output in outputs.values()]
