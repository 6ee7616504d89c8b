"""From a GGUF file to a transformers model: configuration and dequantized weights.

The dense llama, qwen2 and qwen3 families are converted here, which is quick; everything else that
transformers can convert goes through transformers, which needs accelerate for it.
"""

from __future__ import annotations

import contextlib
import io
from importlib.util import find_spec
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

from aiosched.errors import ModelLoadError
from aiosched.model.attention_interface import NAME
from aiosched.model.gguf_checks import FAMILIES, refuse_wrong_tensors
from aiosched.model.gguf_file import GGUFFile
from aiosched.model.gguf_settings import halves_of_rope, settings_of
from aiosched.model.loaded_weights import complete
from aiosched.model.progress import Progress

_CLASSES = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}


def load_gguf_model(file: GGUFFile, dtype: torch.dtype, progress: Progress) -> PreTrainedModel:
    """The model of ``file`` on the CPU, its weights unpacked to ``dtype``.

    Args:
        file: ``refuse_unsupported`` must have let it pass.

    Raises:
        ModelLoadError: the architecture is not known, tensors do not fit, or transformers has to
            convert it and accelerate is not installed.
    """
    if file.architecture in FAMILIES:
        return _convert(file, dtype, progress)
    return _through_transformers(file, dtype)


def _convert(file: GGUFFile, dtype: torch.dtype, progress: Progress) -> PreTrainedModel:
    settings = settings_of(file)
    refuse_wrong_tensors(file, settings)
    family = _CLASSES[file.architecture]
    config = getattr(transformers, f"{family}Config")(**settings)
    state = {}
    names = _transformers_names(file, config)
    for done, (name, gguf_name) in enumerate(names.items()):
        values = file.tensor(gguf_name)
        projection = gguf_name.rpartition(".")[0]
        if file.architecture == "llama" and projection.endswith(("attn_q", "attn_k")):
            heads = (
                config.num_attention_heads if "attn_q" in gguf_name else config.num_key_value_heads
            )
            values = halves_of_rope(values, heads)
        state[name] = values.to(dtype)
        progress("unpack weights", done + 1, len(names))
    model_class = getattr(transformers, f"{family}ForCausalLM")
    model: PreTrainedModel = model_class.from_pretrained(
        None, config=config, state_dict=state, dtype=dtype, attn_implementation=NAME
    )
    if "rope_freqs.weight" in file.tensors:
        # Llama 3.1's long context: each frequency divided by a factor of its own.
        model.model.rotary_emb.inv_freq.div_(file.tensor("rope_freqs.weight"))
    return model


def _transformers_names(file: GGUFFile, config: Any) -> dict[str, str]:
    """Parameter names of transformers with the tensors that hold them."""
    from gguf.constants import MODEL_ARCH_NAMES
    from gguf.tensor_mapping import get_tensor_name_map

    arch = next(arch for arch, name in MODEL_ARCH_NAMES.items() if name == file.architecture)
    mapping = get_tensor_name_map(arch, config.num_hidden_layers)
    with torch.device("meta"):
        blank = getattr(transformers, f"{_CLASSES[file.architecture]}ForCausalLM")(config)
    names, missing = {}, []
    for name, _ in blank.named_parameters():  # a tied lm_head is not listed twice
        gguf_name = mapping.get_name(name, try_suffixes=(".weight", ".bias"))
        if gguf_name in file.tensors:
            names[name] = gguf_name
        else:
            missing.append(name)
    if missing:
        raise ModelLoadError(f"{file.path} has no tensor for {missing[0]} ({len(missing)} missing)")
    # What is left over here is part of the family, but of no model with these settings.
    left = set(file.tensors) - set(names.values()) - {"rope_freqs.weight"}
    if left:
        raise ModelLoadError(
            f"{file.path} has tensors that {type(blank).__name__} does not know: "
            f"{', '.join(sorted(left)[:3])}"
        )
    return names


def _through_transformers(file: GGUFFile, dtype: torch.dtype) -> PreTrainedModel:
    if find_spec("accelerate") is None:
        raise ModelLoadError(
            f"{file.path}: GGUF files of the family {file.architecture!r} are read with "
            "accelerate, which is not installed: pip install 'aiosched-engine[gguf]'"
        )
    from transformers import GgufConfig

    # Packed weights would need kernels of their own; its progress bars cannot be turned off.
    with contextlib.redirect_stderr(io.StringIO()):
        loaded = AutoModelForCausalLM.from_pretrained(
            str(file.path.parent),
            gguf_file=file.path.name,
            dtype=dtype,
            quantization_config=GgufConfig(dequantize=True),
            output_loading_info=True,
        )
    return complete(loaded, str(file.path))
