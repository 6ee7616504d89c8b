"""From a GGUF file to a transformers model: configuration and dequantized weights.

The dense llama, qwen2 and qwen3 families are converted here, which is quick; everything else that
transformers can convert goes through transformers, which needs accelerate for it.
"""

from __future__ import annotations

import contextlib
import io
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, PreTrainedModel

from aiosched.errors import ModelLoadError
from aiosched.model.attention_interface import NAME
from aiosched.model.gguf_file import GGUFFile
from aiosched.model.progress import Progress

_FAMILIES = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}


def load_gguf_model(file: GGUFFile, dtype: torch.dtype, progress: Progress) -> PreTrainedModel:
    """The model of ``file`` on the CPU, its weights unpacked to ``dtype``.

    Raises:
        ModelLoadError: the architecture or its rope scaling is not known, tensors are missing, or
            transformers has to convert it and accelerate is not installed.
    """
    scaling = file.metadata.get(f"{file.architecture}.rope.scaling.type", "none")
    if scaling not in ("none", "linear"):
        raise ModelLoadError(f"{file.path}: rope scaling {scaling!r} of a GGUF is not supported")
    if file.architecture in _FAMILIES and not file.metadata.get(
        f"{file.architecture}.expert_count"
    ):
        return _convert(file, dtype, progress)
    return _through_transformers(file, dtype)


def _convert(file: GGUFFile, dtype: torch.dtype, progress: Progress) -> PreTrainedModel:
    family = _FAMILIES[file.architecture]
    config = getattr(transformers, f"{family}Config")(**_settings(file))
    state = {}
    names = _transformers_names(file, config)
    for done, (name, gguf_name) in enumerate(names.items()):
        values = file.tensor(gguf_name)
        if file.architecture == "llama" and gguf_name.endswith(("attn_q.weight", "attn_k.weight")):
            heads = (
                config.num_attention_heads if "attn_q" in gguf_name else config.num_key_value_heads
            )
            values = _halves_of_rope(values, heads)
        # A copy: an array that is a view of the file is read-only and dies with it.
        state[name] = torch.from_numpy(np.array(values, copy=not values.flags.owndata)).to(dtype)
        progress("unpack weights", done + 1, len(names))
    model_class = getattr(transformers, f"{family}ForCausalLM")
    model: PreTrainedModel = model_class.from_pretrained(
        None, config=config, state_dict=state, dtype=dtype, attn_implementation=NAME
    )
    if "rope_freqs.weight" in file.tensors:
        # Llama 3.1's long context: each frequency divided by a factor of its own.
        factors = torch.from_numpy(file.tensor("rope_freqs.weight").copy())
        model.model.rotary_emb.inv_freq.div_(factors)
    return model


def _settings(file: GGUFFile) -> dict[str, Any]:
    """Keyword arguments of the configuration class."""

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


def end_of_generation_ids(file: GGUFFile) -> list[int]:
    """End of sequence, of turn and of message, as far as the file names them."""
    names = ("eos_token_id", "eot_token_id", "eom_token_id")
    ids = [file.metadata.get(f"tokenizer.ggml.{name}") for name in names]
    return list(dict.fromkeys(int(id_) for id_ in ids if id_ is not None))


def _transformers_names(file: GGUFFile, config: Any) -> dict[str, str]:
    """Parameter names of transformers with the tensors that hold them."""
    from gguf.constants import MODEL_ARCH_NAMES
    from gguf.tensor_mapping import get_tensor_name_map

    arch = next(arch for arch, name in MODEL_ARCH_NAMES.items() if name == file.architecture)
    mapping = get_tensor_name_map(arch, config.num_hidden_layers)
    with torch.device("meta"):
        blank = getattr(transformers, f"{_FAMILIES[file.architecture]}ForCausalLM")(config)
    names, missing = {}, []
    for name, _ in blank.named_parameters():  # a tied lm_head is not listed twice
        gguf_name = mapping.get_name(name, try_suffixes=(".weight", ".bias"))
        if gguf_name in file.tensors:
            names[name] = gguf_name
        else:
            missing.append(name)
    if missing:
        raise ModelLoadError(f"{file.path} has no tensor for {missing[0]} ({len(missing)} missing)")
    left = set(file.tensors) - set(names.values()) - {"rope_freqs.weight"}
    if left:
        raise ModelLoadError(
            f"{file.path} has tensors that {type(blank).__name__} does not know: "
            f"{', '.join(sorted(left)[:3])}"
        )
    return names


def _halves_of_rope(weights: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Rows of a query or key projection in transformers' order.

    llama.cpp rotates neighbouring rows of a head with each other, transformers row i with row
    i + head_dim / 2.
    """
    pairs = weights.reshape(heads, -1, 2, weights.shape[-1])
    return pairs.swapaxes(1, 2).reshape(weights.shape)


def _through_transformers(file: GGUFFile, dtype: torch.dtype) -> PreTrainedModel:
    if find_spec("accelerate") is None:
        raise ModelLoadError(
            f"{file.path}: GGUF files of the family {file.architecture!r} are read with "
            "accelerate, which is not installed: pip install 'aiosched-engine[gguf]'"
        )
    from transformers import GgufConfig

    # Packed weights would need kernels of their own; its progress bars cannot be turned off.
    with contextlib.redirect_stderr(io.StringIO()):
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            str(file.path.parent),
            gguf_file=file.path.name,
            dtype=dtype,
            quantization_config=GgufConfig(dequantize=True),
        )
    return model
