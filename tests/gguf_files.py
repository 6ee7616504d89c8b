"""GGUF files written as llama.cpp's converter would, and small models to put in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from gguf import GGUFWriter

GEMMA2_NAMES = {
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "post_attention_layernorm": "post_attention_norm",
}
GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.layers": "blk",
}


def byte_alphabet() -> list[str]:
    from tokenizers.pre_tokenizers import ByteLevel

    return sorted(ByteLevel.alphabet())


def write_gguf(
    path: Path,
    architecture: str,
    model: Any = None,
    **metadata: str | int | float | bool | list[int],
) -> Path:
    """A GGUF file as llama.cpp's converter would write it, in float32."""
    writer = GGUFWriter(path, architecture)
    for key, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_float32(key, value)
    tokens = [*byte_alphabet(), "<s>", "</s>", "ĠĠ", "he", "12"]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 256 + [3, 3, 1, 1, 1])
    writer.add_token_merges(["Ġ Ġ", "h e", "1 2"])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(257)
    if model is not None:
        config = model.config
        writer.add_context_length(config.max_position_embeddings)
        writer.add_embedding_length(config.hidden_size)
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_block_count(config.num_hidden_layers)
        writer.add_head_count(config.num_attention_heads)
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_key_length(config.head_dim)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
        for name, parameter in model.named_parameters():
            values = parameter.detach().numpy()
            if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
                heads = (
                    config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
                )
                halves = values.reshape(heads, 2, -1, *values.shape[1:])
                values = halves.swapaxes(1, 2).reshape(values.shape)
            names = GEMMA2_NAMES if architecture == "gemma2" else {}
            for theirs, ours in (GGUF_NAMES | names).items():
                name = name.replace(theirs, ours)
            writer.add_tensor(name, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tiny(family: str, **changed: Any) -> Any:
    """A model of transformers with random weights: ``Llama``, ``Qwen2`` or ``Qwen3``."""
    config = getattr(transformers, f"{family}Config")(**{
        "vocab_size": 261, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "max_position_embeddings": 64, "tie_word_embeddings": True, "eos_token_id": 257,
        "bos_token_id": 256, "pad_token_id": None, **changed,
    })  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = getattr(transformers, f"{family}ForCausalLM")(config)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
    return model
