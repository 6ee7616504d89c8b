"""A dense model of transformers as a ``DenseModel``: which ones it computes, and the move."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import LlamaForCausalLM, PreTrainedModel, Qwen2ForCausalLM, Qwen3ForCausalLM

from aiosched.model.dense_model import DenseModel
from aiosched.model.dense_shape import DenseShape
from aiosched.model.progress import Progress
from aiosched.model.transformers_model import end_token_ids

_CLASSES = (LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)
_ROPE_TYPES = frozenset({"default", "linear", "llama3"})
"""Those whose frequencies depend on the configuration alone and not on the sequence."""


def is_dense(model: PreTrainedModel) -> bool:
    """Whether ``DenseModel`` computes what ``model`` does. Derived classes are not looked into."""
    if type(model) not in _CLASSES:
        return False
    config: Any = model.config
    rope = config.rope_parameters
    return (
        config.hidden_act == "silu"
        and not getattr(config, "mlp_bias", False)
        and set(getattr(config, "layer_types", None) or ()) <= {"full_attention"}
        and not getattr(config, "use_sliding_window", False)
        and getattr(config, "is_causal", True)
        and rope.get("rope_type", "default") in _ROPE_TYPES
        and rope.get("partial_rotary_factor", 1.0) == 1.0
        and model.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and not getattr(model, "is_quantized", False)
    )


def dense_model_of(
    model: PreTrainedModel, tokenizer: Any, progress: Progress, options: Mapping[str, Any]
) -> DenseModel:
    """The weights of ``model``, for which ``is_dense`` holds, as a ``DenseModel``."""
    config: Any = model.config
    rotary: Any = model.model.rotary_emb
    shape = DenseShape(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=model.model.layers[0].self_attn.head_dim if config.num_hidden_layers else 0,
        max_model_len=config.max_position_embeddings,
        rms_norm_eps=config.rms_norm_eps,
        tied=config.tie_word_embeddings,
        inv_freq=rotary.inv_freq.detach().float().clone(),
    )
    return DenseModel(
        shape,
        model.state_dict().get,
        model.dtype,
        tokenizer=tokenizer,
        eos_token_ids=end_token_ids(model, tokenizer),
        progress=progress,
        **options,
    )
