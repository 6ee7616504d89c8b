"""What a GGUF file says of a dense model, in the words of transformers' configurations."""

from __future__ import annotations

from typing import Any

import torch

from aiosched.errors import ModelLoadError
from aiosched.model.gguf_file import GGUFFile


def settings_of(file: GGUFFile) -> dict[str, Any]:
    """Keyword arguments of the configuration class of a llama, qwen2 or qwen3 file.

    Raises:
        ModelLoadError: the file does not say something that it must, or sizes that cannot be.
    """
    family = file.architecture

    def said(name: str) -> Any:
        return file.metadata.get(f"{family}.{name}")

    def key(name: str, default: Any = None) -> Any:
        value = file.metadata.get(f"{family}.{name}", default)
        if value is None:
            raise ModelLoadError(f"{file.path} does not say its {family}.{name}")
        return value

    def size(name: str, default: int | None = None) -> int:
        value = key(name, default)
        if type(value) is not int or value < 1:  # some families have a list, layer by layer
            raise ModelLoadError(f"{file.path}: {family}.{name} = {value!r} is not a size")
        return value

    hidden_size, heads = size("embedding_length"), size("attention.head_count")
    kv_heads = size("attention.head_count_kv", heads)
    head_dim = size("attention.key_length", hidden_size // heads)
    if heads % kv_heads:
        raise ModelLoadError(f"{file.path}: {heads} query heads cannot share {kv_heads} KV heads")
    if head_dim % 2:
        raise ModelLoadError(f"{file.path}: heads of {head_dim} numbers cannot be rotated in pairs")
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": key("rope.freq_base", 10_000.0)}
    # A factor alone is a linear one, as in llama.cpp.
    kind = key("rope.scaling.type", "linear" if said("rope.scaling.factor") else "none")
    if kind == "linear":
        factor = key("rope.scaling.factor", 1.0) or 1.0
        if factor < 0:
            raise ModelLoadError(
                f"{file.path}: {family}.rope.scaling.factor = {factor!r} is not supported"
            )
        rope |= {"rope_type": "linear", "factor": factor}
    settings: dict[str, Any] = {
        "vocab_size": len(file.metadata.get("tokenizer.ggml.tokens", ())) or size("vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": size("feed_forward_length"),
        "num_hidden_layers": size("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": size("context_length"),
        "rms_norm_eps": key("attention.layer_norm_rms_epsilon"),
        "rope_parameters": rope,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": end_of_generation_ids(file) or None,
        "pad_token_id": file.metadata.get("tokenizer.ggml.padding_token_id"),
    }
    if family != "qwen2":  # whose biases are not a setting
        settings["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    if family == "llama":
        settings["mlp_bias"] = "blk.0.ffn_down.bias" in file.tensors
    return settings


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
