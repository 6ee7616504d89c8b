"""Models that transformers reads: folders, Hub repositories, random weights, GGUF of any family."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from aiosched.errors import ModelLoadError
from aiosched.model.attention_interface import NAME
from aiosched.model.builtin import BUILTIN_MODELS
from aiosched.model.dense_model import DenseModel
from aiosched.model.flashinfer_attention import FlashInferModel, usable_for
from aiosched.model.loaded_weights import complete
from aiosched.model.progress import Progress
from aiosched.model.quiet import quiet_transformers
from aiosched.model.transformers_dense import dense_model_of, is_dense
from aiosched.model.transformers_model import TransformersModel

logger = logging.getLogger(__name__)

Source: TypeAlias = Callable[[], tuple[PreTrainedModel, Any]]
"""Loads a model of transformers and its tokenizer, which may be ``None``."""

# transformers builds models under switches of the whole process (no initialization, the meta
# device, what it prints): two loads at once would see each other's.
_one_at_a_time = threading.Lock()


def load_through_transformers(
    name: str, source: Source, device: str, progress: Progress, options: Mapping[str, Any]
) -> TransformersModel | DenseModel:
    """What ``source`` loads, on ``device``: a ``DenseModel`` on the CPU if it is of that family.

    Threads take turns here.

    Args:
        name: for errors.
        options: further arguments of ``DenseModel``. Another model is refused if there are any.

    Raises:
        ModelLoadError: it cannot be served; says why.
    """
    with _one_at_a_time, quiet_transformers():
        model, tokenizer = source()
        if device == "cpu" and is_dense(model):
            return dense_model_of(model, tokenizer, progress, options)
        if options:
            asked = " and ".join(option.removesuffix("_in") for option in options)
            raise ModelLoadError(
                f"model {name!r} cannot be loaded with {asked}: that is for models of the dense "
                "llama, qwen2 and qwen3 families"
            )
        progress("move to device", 0, 1)
        try:
            model.to(torch.device(device))  # type: ignore[arg-type]
            # The probe inside runs the model once, on its device.
            loaded = TransformersModel(model, tokenizer)
            if usable_for(loaded):
                loaded = FlashInferModel(model, tokenizer)
        except (RuntimeError, AssertionError) as error:  # the latter of a torch without CUDA
            raise ModelLoadError(f"model {name!r} does not run on {device}: {error}") from error
        progress("move to device", 1, 1)
    return loaded


def load_checkpoint(name: str, dtype: torch.dtype | None, kind: str) -> tuple[PreTrainedModel, Any]:
    """A folder or a repository; ``kind`` says which, for errors."""
    try:
        loaded = AutoModelForCausalLM.from_pretrained(
            name,
            dtype=dtype or "auto",
            attn_implementation=NAME,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except Exception as error:  # no end to what a broken file or connection may raise there
        known = ", ".join(BUILTIN_MODELS)
        raise ModelLoadError(
            f"model {name!r} cannot be loaded, tried as a {kind}: {first_line(error)} "
            f"(built-in models: {known})"
        ) from error
    model = complete(loaded, f"model {name!r}")
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except Exception as error:
        # Weights without a tokenizer are served by token ids.
        logger.info("%s: no tokenizer: %s", name, first_line(error))
        tokenizer = None
    return model, tokenizer


def first_line(error: BaseException) -> str:
    """What an error says, in one line."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
