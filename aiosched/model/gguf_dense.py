"""From a GGUF file of the llama, qwen2 or qwen3 family straight to a ``DenseModel``.

Nothing here imports transformers, whose model code alone takes seconds of a start.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from aiosched.model.dense_model import DenseModel
from aiosched.model.dense_shape import DenseShape
from aiosched.model.gguf_checks import refuse_wrong_tensors
from aiosched.model.gguf_file import GGUFFile
from aiosched.model.gguf_settings import end_of_generation_ids, halves_of_rope, settings_of
from aiosched.model.gguf_tokenizer import load_fast_tokenizer
from aiosched.model.progress import Progress

_TENSORS = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
"""Names in transformers and in a GGUF, without layer and suffix."""


def load_gguf_dense(
    file: GGUFFile, dtype: torch.dtype, progress: Progress, options: Mapping[str, Any]
) -> DenseModel:
    """The model of ``file`` and its tokenizer, weights unpacked to ``dtype``.

    Args:
        file: of one of these families; ``refuse_unsupported`` must have let it pass.
        options: further arguments of ``DenseModel``.

    Raises:
        ModelLoadError: tensors are missing, left over, of another shape or of a kind that cannot
            be read.
    """
    settings = settings_of(file)
    refuse_wrong_tensors(file, settings)
    shape = DenseShape(
        vocab_size=settings["vocab_size"],
        hidden_size=settings["hidden_size"],
        intermediate_size=settings["intermediate_size"],
        num_layers=settings["num_hidden_layers"],
        num_heads=settings["num_attention_heads"],
        num_kv_heads=settings["num_key_value_heads"],
        head_dim=settings["head_dim"],
        max_model_len=settings["max_position_embeddings"],
        rms_norm_eps=settings["rms_norm_eps"],
        tied=settings["tie_word_embeddings"],
        inv_freq=_inv_freq(file, settings),
    )
    tokenizer = load_fast_tokenizer(file)
    ends = [*end_of_generation_ids(file), tokenizer.eos_token_id]
    return DenseModel(
        shape,
        _Tensors(file, shape).fetch,
        dtype,
        tokenizer=tokenizer,
        eos_token_ids=tuple(dict.fromkeys(end for end in ends if end is not None)),
        progress=progress,
        **options,
    )


def _inv_freq(file: GGUFFile, settings: dict[str, Any]) -> torch.Tensor:
    rope, dim = settings["rope_parameters"], settings["head_dim"]
    exponents = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
    inv_freq: torch.Tensor = 1.0 / (rope["rope_theta"] ** exponents)
    if rope["rope_type"] == "linear":
        inv_freq /= rope["factor"]
    if "rope_freqs.weight" in file.tensors:
        # Llama 3.1's long context: each frequency divided by a factor of its own.
        inv_freq /= file.tensor("rope_freqs.weight")
    return inv_freq


class _Tensors:
    """The tensors of a file under their names in transformers."""

    def __init__(self, file: GGUFFile, shape: DenseShape) -> None:
        self._file = file
        self._heads = {"attn_q": shape.num_heads, "attn_k": shape.num_kv_heads}

    def fetch(self, name: str) -> torch.Tensor | None:
        stem, _, suffix = name.rpartition(".")
        layer = ""
        if stem.startswith("model.layers."):
            number, _, stem = stem.removeprefix("model.layers.").partition(".")
            layer = f"blk.{number}."
        kind = _TENSORS[stem]
        stored = f"{layer}{kind}.{suffix}"
        if stored not in self._file.tensors:
            return None
        values = self._file.tensor(stored)
        if self._file.architecture == "llama" and kind in self._heads:
            values = halves_of_rope(values, self._heads[kind])
        return values
