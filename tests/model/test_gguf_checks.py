"""A GGUF file whose meaning would not be computed is refused by the name of what it says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_files import tiny, write_gguf
from paged_steps import greedy

from aiosched.errors import ModelLoadError
from aiosched.model.loader import load_model
from aiosched.model.transformers_model import TransformersModel

PRE = {"tokenizer.ggml.pre": "gpt-2"}
FAMILIES = ["llama", "qwen2", "qwen3"]


def written(path: Path, family: str, said: dict[str, Any], **settings: Any) -> Path:
    """A file that says ``said`` (keys without the family) beside what belongs there."""
    keys = {f"{family}.{key}": value for key, value in said.items()}
    model = tiny(family.capitalize(), num_hidden_layers=1, **settings)
    return write_gguf(path / "m.gguf", family, model, **PRE, **keys)


# As "meta", a file goes the way to all devices but the CPU; what is refused, is before it arrives.
@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention.sliding_window", 16),
        ("rope.dimension_count", 4),
        ("rope.scaling.type", "yarn"),
        ("rope.scaling.attn_factor", 2.0),
        ("attention.value_length", 4),
        ("attention.causal", False),
        ("attention.scale", 0.5),
        ("expert_count", 8),
        ("final_logit_softcapping", 30.0),
        ("logit_scale", 0.25),
        ("vocab_size", 300),
        ("some.new.key", 1),
    ],
)
def test_a_setting_that_would_be_ignored_is_refused_by_name(
    tmp_path: Path, family: str, device: str, key: str, value: Any
) -> None:
    path = written(tmp_path, family, {key: value})
    with pytest.raises(ModelLoadError, match=rf"{family}\.{key} = {value!r} is not supported"):
        load_model(str(path), device=device)


def test_settings_that_change_nothing_are_accepted(tmp_path: Path) -> None:
    said = {
        "attention.sliding_window": 64,
        "rope.dimension_count": 8,
        "rope.scaling.type": "none",
        "rope.scaling.finetuned": False,
        "attention.value_length": 8,
        "attention.causal": True,
        "expert_count": 0,
        "final_logit_softcapping": 0.0,
        "vocab_size": 261,
    }
    assert load_model(str(written(tmp_path, "llama", said))).vocab_size == 261


def test_a_factor_alone_scales_rope_linearly(tmp_path: Path) -> None:
    rope = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
    original = tiny("Llama", rope_parameters=rope)
    keys = {"llama.rope.scaling.factor": 4.0}
    path = write_gguf(tmp_path / "m.gguf", "llama", original, **PRE, **keys)
    loaded = load_model(str(path), dtype="float32")
    assert greedy(loaded, [7, 8, 9], 12) == greedy(TransformersModel(original), [7, 8, 9], 12)


@pytest.mark.parametrize("factor", [None, 0.0, 1.0])
def test_linear_rope_scaling_by_no_factor_changes_nothing(
    tmp_path: Path, factor: float | None
) -> None:
    original = tiny("Llama")
    keys: dict[str, Any] = {"llama.rope.scaling.type": "linear"}
    if factor is not None:
        keys["llama.rope.scaling.factor"] = factor
    path = write_gguf(tmp_path / "m.gguf", "llama", original, **PRE, **keys)
    loaded = load_model(str(path), dtype="float32")
    assert greedy(loaded, [7, 8, 9], 12) == greedy(TransformersModel(original), [7, 8, 9], 12)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("rope.scaling.factor", -2.0, "rope.scaling.factor = -2.0"),
        ("attention.head_count_kv", 3, "4 query heads cannot share 3"),
        ("attention.key_length", 7, "heads of 7 numbers"),
        ("feed_forward_length", [48, 64], r"feed_forward_length = \[48, 64\] is not a size"),
        ("block_count", 0, "block_count = 0 is not a size"),
    ],
)
def test_sizes_that_cannot_be_are_refused(tmp_path: Path, key: str, value: Any, said: str) -> None:
    keys: dict[str, Any] = {
        "embedding_length": 32, "feed_forward_length": 48, "block_count": 1, "context_length": 64,
        "attention.head_count": 4, "attention.layer_norm_rms_epsilon": 1e-5, key: value,
    }  # fmt: skip
    keys = {f"llama.{name}": value for name, value in keys.items()}
    path = write_gguf(tmp_path / "m.gguf", "llama", **PRE, **keys)
    with pytest.raises(ModelLoadError, match=said):
        load_model(str(path))


@pytest.mark.parametrize(
    "scaling", [{"type": "linear", "factor": 8.0}, {"factor": 8.0}, {"factor": 0.5}]
)
def test_linear_rope_scaling_of_other_families_is_refused(
    tmp_path: Path, scaling: dict[str, Any]
) -> None:
    keys = {f"gemma3.rope.scaling.{name}": value for name, value in scaling.items()}
    path = write_gguf(tmp_path / "m.gguf", "gemma3", **PRE, **keys)
    with pytest.raises(ModelLoadError, match="rope scaling of the family 'gemma3'"):
        load_model(str(path))


def test_one_part_of_a_file_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "llama", **PRE, **{"split.count": 3})
    with pytest.raises(ModelLoadError, match="one of 3 parts"):
        load_model(str(path))


def changed(model: Any, name: str, shape: tuple[int, ...] | None) -> None:
    """Give the parameter ``name`` another shape, or drop it."""
    owner, _, own_name = name.rpartition(".")
    parameter = None if shape is None else torch.nn.Parameter(torch.ones(shape))
    setattr(model.get_submodule(owner), own_name, parameter)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    ("name", "shape", "said"),
    [
        ("model.embed_tokens.weight", (200, 32), r"'token_embd.weight' .*\[200, 32\].*\[261, 32\]"),
        ("model.norm.weight", (1,), r"'output_norm.weight' .*\[1\].*\[32\]"),
        ("model.layers.0.input_layernorm.weight", (8,), "'blk.0.attn_norm.weight'"),
        ("model.layers.0.self_attn.k_proj.bias", (8,), "'blk.0.attn_k.bias'"),
        ("model.layers.0.self_attn.v_proj.weight", (8, 32), "'blk.0.attn_v.weight'"),
        ("model.layers.0.mlp.down_proj.weight", (16, 32), "'blk.0.ffn_down.weight'"),
        ("model.layers.0.mlp.down_proj.weight", None, "no tensor 'blk.0.ffn_down.weight'"),
        ("model.layers.0.self_attn.q_norm.weight", (8,), "'blk.0.attn_q_norm.weight' is none"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(
    tmp_path: Path, device: str, name: str, shape: tuple[int, ...] | None, said: str
) -> None:
    model = tiny("Llama", num_hidden_layers=1, attention_bias=True)
    if "q_norm" in name:
        model.model.layers[0].self_attn.q_norm = torch.nn.Module()
    changed(model, name, shape)
    path = write_gguf(tmp_path / "m.gguf", "llama", model, **PRE)
    with pytest.raises(ModelLoadError, match=said):
        load_model(str(path), device=device)


def test_nothing_is_unpacked_before_all_tensors_are_seen_to_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny("Llama")
    changed(model, "model.layers.1.mlp.up_proj.weight", (47, 32))
    path = write_gguf(tmp_path / "m.gguf", "llama", model, **PRE)

    def unpacked(*_: object) -> None:
        raise AssertionError("read")

    monkeypatch.setattr("aiosched.model.gguf_file.unpack", unpacked)
    with pytest.raises(ModelLoadError, match=r"'blk.1.ffn_up.weight'"):
        load_model(str(path))
