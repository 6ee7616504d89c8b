"""What a GGUF file says of a dense model, in the words of transformers' configurations."""

from __future__ import annotations

from typing import Any

import torch

from aiosched.errors import ModelLoadError
from aiosched.model.gguf_file import GGUFFile


def settings_of(file: GGUFFile) -> dict[str, Any]:
    """Keyword arguments of the configuration class of a llama, qwen2 or qwen3 file.

    Raises:
        ModelLoadError: the file does not say something that it must.
    """

    def key(name: str, default: Any = None) -> Any:
        value = file.metadata.get(f"{file.architecture}.{name}", default)
        if value is None:
            raise ModelLoadError(f"{file.path} does not say its {file.architecture}.{name}")
        return value

    heads = key("attention.head_count")
    kv_heads = key("attention.head_count_kv", heads)
    head_dim = key("attention.key_length", key("embedding_length") // heads)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": key("rope.freq_base", 10_000.0)}
    if file.metadata.get(f"{file.architecture}.rope.scaling.type") == "linear":
        rope |= {"rope_type": "linear", "factor": key("rope.scaling.factor")}
    settings: dict[str, Any] = {
        "vocab_size": len(file.metadata.get("tokenizer.ggml.tokens", ())) or key("vocab_size"),
        "hidden_size": key("embedding_length"),
        "intermediate_size": key("feed_forward_length"),
        "num_hidden_layers": key("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": key("context_length"),
        "rms_norm_eps": key("attention.layer_norm_rms_epsilon"),
        "rope_parameters": rope,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": end_of_generation_ids(file) or None,
        "pad_token_id": file.metadata.get("tokenizer.ggml.padding_token_id"),
    }
    if file.architecture == "llama":
        settings["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    return settings


def refuse_unknown_scaling(file: GGUFFile) -> None:
    """Raises ModelLoadError for a file whose positions are scaled in a way that is not known."""
    scaling = file.metadata.get(f"{file.architecture}.rope.scaling.type", "none")
    if scaling not in ("none", "linear"):
        raise ModelLoadError(f"{file.path}: rope scaling {scaling!r} of a GGUF is not supported")


def end_of_generation_ids(file: GGUFFile) -> list[int]:
    """End of sequence, of turn and of message, as far as the file names them."""
    names = ("eos_token_id", "eot_token_id", "eom_token_id")
    ids = [file.metadata.get(f"tokenizer.ggml.{name}") for name in names]
    return list(dict.fromkeys(int(id_) for id_ in ids if id_ is not None))


def halves_of_rope(values: torch.Tensor, heads: int) -> torch.Tensor:
    """Weight or bias of a query or key projection, its rows in transformers' order.

    llama.cpp rotates neighbouring rows of a head with each other, transformers row i with row
    i + head_dim / 2.
    """
    pairs = values.reshape(heads, -1, 2, values.shape[1:].numel())
    return pairs.transpose(1, 2).reshape(values.shape)
