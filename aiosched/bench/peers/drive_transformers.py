"""transformers, for ``child.py``: ``generate``, or its continuous batching."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import transformers

PAGE = 32


def open_engine(settings: dict[str, Any]) -> tuple[str, Callable[..., list[list[int]]]]:
    library: Any = transformers  # parts of which have types
    library.logging.set_verbosity_error()
    torch.set_num_threads(settings["threads"])
    model = library.AutoModelForCausalLM.from_pretrained(
        settings["model"], dtype=getattr(torch, settings["dtype"]), attn_implementation="sdpa"
    ).eval()

    def config(new_tokens: int) -> Any:
        return library.GenerationConfig(
            max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False,
            pad_token_id=0, eos_token_id=None,
        )  # fmt: skip

    @torch.inference_mode()
    def generate(prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        ids = torch.tensor(prompts)
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), generation_config=config(new_tokens)
        )
        rows: list[list[int]] = output[:, ids.shape[1] :].tolist()
        return rows

    @torch.inference_mode()
    def generate_batch(prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        pages = math.ceil(settings["max_model_len"] / PAGE) * settings["max_batch"]
        # Each call has a manager of its own: one that persists is sized by its first prompts.
        outputs = model.generate_batch(
            prompts,
            generation_config=config(new_tokens),
            continuous_batching_config=library.ContinuousBatchingConfig(
                page_size=PAGE,
                num_blocks=pages,
                max_batch_tokens=max(settings["max_prompt_tokens"], 256),
                allow_block_sharing=False,
            ),
            progress_bar=False,
            warmup=False,
        )
        return [list(output.generated_tokens) for output in outputs.values()]

    return transformers.__version__, generate_batch if settings["batching"] else generate
