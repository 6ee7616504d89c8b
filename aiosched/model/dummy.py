"""Models with random weights of a real shape, for tests and measurements.

    dummy:llama-3.1-8b                                   a preset
    dummy:llama?hidden_size=64&num_hidden_layers=2       a transformers model type and settings
    dummy:path/to/config.json                            a configuration file
    dummy:path/to/folder                                 a folder with config.json
    …?seed=7                                             after any of these: other weights

Settings are those of the configuration class, written as JSON (``tie_word_embeddings=true``) or as
plain text. A folder's tokenizer is taken along; otherwise there is none.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from aiosched.errors import ModelLoadError
from aiosched.model.attention_interface import NAME

PRESETS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-3.1-8b": (
        "llama",
        {
            "vocab_size": 128_256,
            "hidden_size": 4096,
            "intermediate_size": 14_336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-5,
            "bos_token_id": 128_000,
            "eos_token_id": [128_001, 128_008, 128_009],
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500_000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        },
    ),
    "qwen3-0.6b": (
        "qwen3",
        {
            "vocab_size": 151_936,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 40_960,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
            "bos_token_id": 151_643,
            "eos_token_id": 151_645,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
        },
    ),
}


def load_dummy(spec: str, dtype: torch.dtype | None, device: str) -> tuple[PreTrainedModel, Any]:
    """The model that ``spec`` (what follows ``dummy:``) describes, and its tokenizer or ``None``.

    Args:
        dtype: ``None`` for the configuration's own, else float32.

    Raises:
        ModelLoadError: there is no such preset, model type, file or setting.
    """
    shape, _, query = spec.partition("?")
    settings = {name: _parsed(text) for name, text in parse_qsl(query, keep_blank_values=True)}
    seed = settings.pop("seed", 0)
    try:
        config = _config(shape, settings)
        dtype = dtype or getattr(config, "dtype", None) or torch.float32
        with torch.random.fork_rng(devices=[] if device == "cpu" else None):
            torch.manual_seed(seed)
            with torch.device(device):
                model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                    config, dtype=dtype, attn_implementation=NAME, trust_remote_code=False
                )
        folder = Path(shape)
        has_tokenizer = (folder / "tokenizer_config.json").is_file()
        tokenizer = AutoTokenizer.from_pretrained(folder) if has_tokenizer else None
    except Exception as error:  # a configuration out of range fails anywhere in model code
        raise ModelLoadError(f"model 'dummy:{spec}' cannot be made: {error}") from error
    return model, tokenizer


def _config(shape: str, settings: dict[str, Any]) -> Any:
    if shape in PRESETS:
        model_type, preset = PRESETS[shape]
        return _configured(model_type, preset, settings)
    if not shape:
        raise ValueError("there is no shape after the colon")
    path = Path(shape)
    if path.exists():
        written = json.loads((path / "config.json" if path.is_dir() else path).read_text())
        return _configured(written.pop("model_type"), written, settings)
    if "/" in shape or shape.endswith(".json"):
        raise ValueError(f"there is no {shape}")
    return _configured(shape, {}, settings)


def _configured(model_type: str, shape: dict[str, Any], settings: dict[str, Any]) -> Any:
    config = AutoConfig.for_model(model_type, **shape)
    for name in settings:
        if not hasattr(config, name):
            raise ValueError(f"{type(config).__name__} has no setting {name!r}")
    return AutoConfig.for_model(model_type, **{**shape, **settings})


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
