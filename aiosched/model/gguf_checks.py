"""What a GGUF file must not say, because what it means would not be computed.

A model that is served with one setting left out answers, fluently and wrongly. So a file of the
dense families is held to a list of what is known: a key or a tensor that is not on it is refused,
even where it might do no harm. Other families are converted by transformers, which reads some keys
and drops the rest; of those, the ones that files do carry are refused here.
"""

from __future__ import annotations

from typing import Any

from aiosched.errors import ModelLoadError
from aiosched.model.gguf_file import GGUFFile
from aiosched.model.gguf_settings import settings_of

FAMILIES = frozenset({"llama", "qwen2", "qwen3"})
"""The dense families. Mixtures of experts may go by the same names."""

_READ = frozenset(
    {
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.layer_norm_rms_epsilon",
        "block_count",
        "context_length",
        "embedding_length",
        "feed_forward_length",
        "rope.freq_base",
        "rope.scaling.factor",
        "rope.scaling.type",
        # Both tell of how scaling by other kinds was trained.
        "rope.scaling.finetuned",
        "rope.scaling.original_context_length",
    }
)


def refuse_unsupported(file: GGUFFile) -> None:
    """Hold what the file says against what can be computed.

    Raises:
        ModelLoadError: names the key and its value.
    """
    if file.metadata.get("split.count", 1) > 1:
        parts = file.metadata["split.count"]
        raise ModelLoadError(f"{file.path} is one of {parts} parts: merge them into one file first")
    family = file.architecture
    factor = file.metadata.get(f"{family}.rope.scaling.factor", 1)
    scaling = file.metadata.get(f"{family}.rope.scaling.type", "none")
    if scaling not in ("none", "linear"):
        raise _refusal(file, "rope.scaling.type")
    if family in FAMILIES:
        _refuse_strange_keys(file)
    elif scaling == "linear" or factor not in (0, 1):
        raise ModelLoadError(
            f"{file.path}: rope scaling of the family {family!r} is not supported in a GGUF"
        )


def _refuse_strange_keys(file: GGUFFile) -> None:
    settings = settings_of(file)
    required = {
        "attention.causal": True,
        "attention.value_length": settings["head_dim"],
        "rope.dimension_count": settings["head_dim"],
        "rope.scale_linear": 1.0,
        "rope.scaling.attn_factor": 1.0,
        "tensor_data_layout": "Meta AI original pth",  # rows of queries and keys in pairs
        "vocab_size": settings["vocab_size"],
    }
    prefix = f"{file.architecture}."
    for key, value in file.metadata.items():
        name = key.removeprefix(prefix)
        if not key.startswith(prefix) or name in _READ:
            continue
        # Zero is llama.cpp's word for "none", of experts and windows as of caps and scales.
        harmless = value == required.get(name, 0)
        if name == "attention.sliding_window" and isinstance(value, int):
            harmless = value == 0 or value >= settings["max_position_embeddings"]
        if not harmless:
            raise _refusal(file, name)


def _refusal(file: GGUFFile, name: str) -> ModelLoadError:
    key = f"{file.architecture}.{name}"
    return ModelLoadError(f"{file.path}: {key} = {file.metadata[key]!r} is not supported")


def refuse_wrong_tensors(file: GGUFFile, settings: dict[str, Any]) -> None:
    """Hold the tensors of a dense file against each other and against what it says.

    Args:
        settings: of ``settings_of``.

    Raises:
        ModelLoadError: names a tensor that is missing, left over or of another shape.
    """
    required, optional = _shapes(file.architecture, settings)
    for name in required:
        if name not in file.tensors:
            raise ModelLoadError(f"{file.path} has no tensor {name!r}")
    expected = required | optional
    for name in file.tensors:
        if name not in expected:
            raise ModelLoadError(
                f"{file.path}: tensor {name!r} is none of the family {file.architecture!r}"
            )
        if (shape := file.shape(name)) != expected[name]:
            raise ModelLoadError(
                f"{file.path}: tensor {name!r} has the shape {list(shape)}; the file's settings "
                f"make it {list(expected[name])}"
            )


Shapes = dict[str, tuple[int, ...]]


def _shapes(family: str, settings: dict[str, Any]) -> tuple[Shapes, Shapes]:
    hidden, width = settings["hidden_size"], settings["intermediate_size"]
    vocab, dim = settings["vocab_size"], settings["head_dim"]
    queries = settings["num_attention_heads"] * dim
    keys = settings["num_key_value_heads"] * dim
    required: Shapes = {"token_embd.weight": (vocab, hidden), "output_norm.weight": (hidden,)}
    optional: Shapes = {"output.weight": (vocab, hidden), "rope_freqs.weight": (dim // 2,)}
    projections = {
        "attn_q": (queries, hidden),
        "attn_k": (keys, hidden),
        "attn_v": (keys, hidden),
        "attn_output": (hidden, queries),
        "ffn_gate": (width, hidden),
        "ffn_up": (width, hidden),
        "ffn_down": (hidden, width),
    }
    for index in range(settings["num_hidden_layers"]):
        layer = f"blk.{index}."
        required |= {f"{layer}{name}.weight": (hidden,) for name in ("attn_norm", "ffn_norm")}
        required |= {f"{layer}{name}.weight": shape for name, shape in projections.items()}
        optional |= {f"{layer}{name}.bias": shape[:1] for name, shape in projections.items()}
        if family == "qwen3":
            required |= {f"{layer}{name}.weight": (dim,) for name in ("attn_q_norm", "attn_k_norm")}
    return required, optional
