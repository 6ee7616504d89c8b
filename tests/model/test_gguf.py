"""GGUF files: read as written, converted to the model they came from, refused when broken."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize
from gguf_files import tiny, write_gguf
from paged_steps import greedy

from aiosched.errors import ModelLoadError
from aiosched.model import gguf_model
from aiosched.model.gguf_file import GGUFFile
from aiosched.model.gguf_tokenizer import load_gguf_tokenizer
from aiosched.model.loader import load_model
from aiosched.model.transformers_model import TransformersModel


@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        ("llama", {}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("qwen2", {"tie_word_embeddings": False}),
        ("qwen3", {}),
        ("qwen3", {"attention_bias": True}),
    ],
)
def test_a_converted_model_computes_what_the_original_does(
    tmp_path: Path, architecture: str, settings: dict[str, Any]
) -> None:
    original = tiny(architecture.capitalize(), **settings)
    metadata = {"tokenizer.ggml.pre": "gpt-2"}
    path = write_gguf(tmp_path / "m.gguf", architecture, original, **metadata)

    loaded = load_model(str(path), dtype="float32")
    # On other devices than the CPU it runs as transformers' own.
    converted = gguf_model.load_gguf_model(GGUFFile(path), torch.float32, lambda *_: None)

    assert loaded.eos_token_ids == (257,)
    assert loaded.max_model_len == 64
    expected = greedy(TransformersModel(original), [7, 8, 9, 10], 12)
    assert greedy(loaded, [7, 8, 9, 10], 12) == expected
    assert greedy(TransformersModel(converted), [7, 8, 9, 10], 12) == expected


def tiny_gemma2() -> Any:
    config = transformers.Gemma2Config(
        vocab_size=261, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=64,
        eos_token_id=257, bos_token_id=256, pad_token_id=None,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = transformers.Gemma2ForCausalLM(config)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        # Small beside what the layers add to it, or the model would echo its last token.
        torch.nn.init.normal_(model.model.embed_tokens.weight, std=0.02)
    return model


def test_other_families_go_through_transformers(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    original = tiny_gemma2()
    norms = [p for name, p in original.named_parameters() if "norm" in name]
    with torch.no_grad():
        for parameter in norms:
            parameter.add_(1)  # as llama.cpp keeps them
        path = write_gguf(
            tmp_path / "m.gguf", "gemma2", original, **{"tokenizer.ggml.pre": "gpt-2"}
        )
        for parameter in norms:
            parameter.sub_(1)

    loaded = load_model(str(path), dtype="float32")

    answer = greedy(loaded, [7, 8, 9, 10], 12)
    assert answer == greedy(TransformersModel(original), [7, 8, 9, 10], 12)
    assert len(set(answer)) > 3
    assert loaded.eos_token_ids == (257,)
    assert loaded.tokenizer is not None


def test_without_accelerate_other_families_are_refused_with_the_way_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(tmp_path / "m.gguf", "gemma2", **{"tokenizer.ggml.pre": "gpt-2"})
    monkeypatch.setattr(gguf_model, "find_spec", lambda name: None)
    with pytest.raises(ModelLoadError, match=r"'gemma2'.*accelerate.*aiosched-engine\[gguf\]"):
        load_model(str(path))


def test_metadata_and_tensors_are_read_as_written(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_string("text", "süß")
    writer.add_int16("minus", -3)
    writer.add_bool("yes", True)
    writer.add_array("numbers", [1, 2, 3])
    writer.add_array("words", ["a", ""])
    values = np.random.default_rng(0).normal(size=(6, 64)).astype(np.float32)
    packed = quantize(values, GGMLQuantizationType.Q8_0)
    writer.add_tensor("plain", values)
    writer.add_tensor("half", values.astype(np.float16))
    writer.add_tensor("packed", packed, raw_dtype=GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    file = GGUFFile(tmp_path / "m.gguf")

    assert {key: file.metadata[key] for key in ("text", "minus", "yes", "numbers", "words")} == {
        "text": "süß",
        "minus": -3,
        "yes": True,
        "numbers": [1, 2, 3],
        "words": ["a", ""],
    }
    assert file.architecture == "llama"
    np.testing.assert_array_equal(file.tensor("plain"), values)
    np.testing.assert_array_equal(file.tensor("half"), values.astype(np.float16))
    unpacked = dequantize(packed, GGMLQuantizationType.Q8_0)
    np.testing.assert_array_equal(file.tensor("packed"), unpacked)


@pytest.mark.parametrize("length", [0, 3, 20, 200])
def test_a_file_cut_short_is_an_error(tmp_path: Path, length: int) -> None:
    whole = write_gguf(tmp_path / "m.gguf", "llama").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[:length])
    with pytest.raises(ModelLoadError, match=r"cut\.gguf"):
        GGUFFile(tmp_path / "cut.gguf")


def tokens(tokenizer: Any, text: str) -> list[str]:
    return tokenizer.convert_ids_to_tokens(tokenizer(text)["input_ids"])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # "smollm" keeps the spaces before a digit together; it and "qwen2" part digits.
        ("smollm", ["he", "ĠĠ", "1", "2"]),
        ("gpt-2", ["he", "Ġ", "Ġ", "12"]),
        ("llama-bpe", ["<s>", "he", "Ġ", "Ġ", "12"]),
        ("qwen2", ["he", "Ġ", "Ġ", "1", "2"]),
    ],
)
def test_text_is_cut_as_the_file_says(tmp_path: Path, name: str, expected: list[str]) -> None:
    path = write_gguf(tmp_path / "m.gguf", "llama", **{"tokenizer.ggml.pre": name})
    tokenizer = load_gguf_tokenizer(GGUFFile(path))
    assert tokens(tokenizer, "he  12") == expected
    assert tokenizer.eos_token_id == 257


def test_special_tokens_stay_whole_and_the_template_comes_along(tmp_path: Path) -> None:
    settings = {"tokenizer.ggml.pre": "smollm", "tokenizer.chat_template": "{{ messages }}"}
    path = write_gguf(tmp_path / "m.gguf", "llama", **settings)
    tokenizer = load_gguf_tokenizer(GGUFFile(path))
    assert tokens(tokenizer, "he</s>1") == ["he", "</s>", "1"]
    assert tokenizer.chat_template == "{{ messages }}"


def test_an_unknown_cut_is_warned_about(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(tmp_path / "m.gguf", "llama", **{"tokenizer.ggml.pre": "new-thing"})
    fallback = type("Fallback", (), {"chat_template": None})()
    monkeypatch.setattr(
        transformers.AutoTokenizer, "from_pretrained", lambda *args, **settings: fallback
    )
    with caplog.at_level(logging.WARNING):
        assert load_gguf_tokenizer(GGUFFile(path)) is fallback
    assert "new-thing" in caplog.text
