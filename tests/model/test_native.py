"""Decode steps in compiled code give the plain path's tokens; sizes that it cannot do are named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from dense_models import FAMILIES, dense, logits_of_mixed_steps
from paged_steps import greedy

from aiosched.errors import ModelLoadError
from aiosched.model.loader import load_model
from aiosched.model.native import build

if not any(build.shutil.which(name) for name in build.COMPILERS):
    pytest.skip("no C++ compiler", allow_module_level=True)


@pytest.fixture
def folder(native_folder: Path) -> Path:
    return native_folder


@pytest.mark.parametrize("name", FAMILIES)
def test_in_float32_tokens_and_logits_equal_the_plain_path(name: str, folder: Path) -> None:
    plain, compiled = dense(name), dense(name, compile_in=folder)

    assert greedy(compiled, [5, 6, 7], 24) == greedy(plain, [5, 6, 7], 24)
    for sequences in (1, 2, 3, 15):  # one, two, four and eight at a time
        expected = logits_of_mixed_steps(plain, sequences)
        for got, wanted in zip(logits_of_mixed_steps(compiled, sequences), expected, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("sequences", [1, 3, 17, 70])
def test_in_bfloat16_logits_stay_near_the_plain_path(
    sequences: int, quantization: str | None, folder: Path
) -> None:
    expected = logits_of_mixed_steps(
        dense("qwen3", torch.bfloat16, quantization=quantization), sequences
    )
    compiled = dense("qwen3", torch.bfloat16, quantization=quantization, compile_in=folder)
    for got, wanted in zip(logits_of_mixed_steps(compiled, sequences), expected, strict=True):
        assert (got - wanted).norm() / wanted.norm() < 0.05


def test_int8_with_float32_activations_equals_its_dequantized_weights(folder: Path) -> None:
    compiled = dense("llama", quantization="int8", compile_in=folder)
    got = logits_of_mixed_steps(compiled, 5)
    compiled._native = None
    for one, other in zip(got, logits_of_mixed_steps(compiled, 5), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    ("setting", "said"),
    [("vocab_size=61", "vocab_size = 61"), ("hidden_size=40", "hidden_size = 40")],
)
def test_sizes_that_do_not_fit_vectors_are_refused(setting: str, said: str, folder: Path) -> None:
    spec = f"dummy:llama?num_hidden_layers=1&intermediate_size=64&num_attention_heads=2&{setting}"
    with pytest.raises(ModelLoadError, match=said):
        load_model(spec, compile=True, cache_dir=folder)


def test_half_precision_is_refused(folder: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"float16.*bfloat16"):
        dense("llama", torch.float16, compile_in=folder)
