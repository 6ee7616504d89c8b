"""Small random models of the dense families, as transformers runs them and as aiosched does."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
import transformers
from paged_steps import PagedSequences
from transformers import PreTrainedModel

from aiosched.model.dense_model import DenseModel
from aiosched.model.inputs import Model
from aiosched.model.transformers_dense import dense_model_of

VOCAB = 96
SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCAB,
    "max_position_embeddings": 128,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama, biases, tied": ("Llama", {"attention_bias": True, "tie_word_embeddings": True}),
    "llama, rope linear": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
    ),
    "llama, rope llama3": ("Llama", {"rope_parameters": LLAMA3_ROPE}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {}),
}


def original(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The model of transformers, with weights large enough that tokens differ."""
    family, settings = FAMILIES[name]
    config = getattr(transformers, f"{family}Config")(**{**SMALL, **settings})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model: PreTrainedModel = getattr(transformers, f"{family}ForCausalLM")(config)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
    return model.to(dtype)


def dense(
    name: str,
    dtype: torch.dtype = torch.float32,
    *,
    quantization: str | None = None,
    compile_in: Path | None = None,
) -> DenseModel:
    """The same weights as a ``DenseModel``."""
    options = {"quantization": quantization, "compile_in": compile_in}
    return dense_model_of(original(name, dtype), None, lambda *_: None, options)


def logits_of_mixed_steps(model: Model, sequences: int, seed: int = 0) -> list[torch.Tensor]:
    """Logits of steps that read prompts, go on reading some, decode beside it, and decode only."""
    rng = random.Random(seed)
    names = [str(index) for index in range(sequences)]
    kv = model.make_kv(16 * sequences, 4)
    paged = PagedSequences(16 * sequences, 4)

    def prompt(length: int) -> list[int]:
        return [rng.randrange(VOCAB) for _ in range(length)]

    steps = [paged.step({}, {name: prompt(rng.randrange(1, 30)) for name in names})]
    outputs = [model.forward(steps[0], kv)]
    half = sequences // 2
    decodes = {name: rng.randrange(VOCAB) for name in names[:half]}
    outputs.append(
        model.forward(paged.step(decodes, {name: prompt(5) for name in names[half:]}), kv)
    )
    for _ in range(3):
        decodes = {name: rng.randrange(VOCAB) for name in names}
        outputs.append(model.forward(paged.step(decodes, {}), kv))
    return [output.float() for output in outputs]
