"""Weights in 4 bits: compiled steps compute with what these stand for, in every batch alike."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from dense_models import FAMILIES, VOCAB, dense, logits_of_mixed_steps, original
from paged_steps import PagedSequences, greedy

from aiosched.config import EngineConfig
from aiosched.errors import InvalidConfig, ModelLoadError
from aiosched.model.dense_model import DenseModel
from aiosched.model.loader import load_model
from aiosched.model.native import build
from aiosched.model.transformers_dense import dense_model_of
from aiosched.model.weights import in_int4, in_int8

if not any(build.shutil.which(name) for name in build.COMPILERS):
    pytest.skip("no C++ compiler", allow_module_level=True)


def rounded(name: str, dtype: torch.dtype = torch.float32) -> DenseModel:
    """In float32 and uncompiled, with the weights that int4 makes of those in ``dtype``."""
    source = original(name, dtype).float()
    with torch.no_grad():
        for key, parameter in source.named_parameters():
            if "_proj.weight" in key:
                parameter.copy_(in_int4(parameter, None).dequantized(torch.float32))
            elif key == "lm_head.weight":
                parameter.copy_(in_int8(parameter, None).dequantized(torch.float32))
    return dense_model_of(source, None, lambda *_: None, {})


@pytest.mark.parametrize("name", sorted(FAMILIES.keys() - {"llama, biases, tied"}))
def test_tokens_and_logits_equal_those_of_a_model_with_rounded_weights(
    name: str, native_folder: Path
) -> None:
    plain = rounded(name)
    compiled = dense(name, quantization="int4", compile_in=native_folder)

    assert greedy(compiled, [5, 6, 7], 24) == greedy(plain, [5, 6, 7], 24)
    for sequences in (1, 2, 7, 32):
        expected = logits_of_mixed_steps(plain, sequences)
        for got, wanted in zip(logits_of_mixed_steps(compiled, sequences), expected, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-3)


def test_with_biases_and_a_tied_head_it_equals_the_uncompiled_step(native_folder: Path) -> None:
    model = dense("llama, biases, tied", quantization="int4", compile_in=native_folder)
    got = logits_of_mixed_steps(model, 5)
    model._native = None
    for one, other in zip(got, logits_of_mixed_steps(model, 5), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("sequences", [1, 3, 17, 70])
def test_in_bfloat16_logits_stay_near_float32(sequences: int, native_folder: Path) -> None:
    expected = logits_of_mixed_steps(rounded("qwen3", torch.bfloat16), sequences)
    compiled = dense("qwen3", torch.bfloat16, quantization="int4", compile_in=native_folder)
    outputs = logits_of_mixed_steps(compiled, sequences)
    for got, wanted in zip(outputs[2:], expected[2:], strict=True):  # those that only decode
        assert (got - wanted).norm() / wanted.norm() < 0.02


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 0.01)])
def test_a_sequence_has_like_logits_in_a_batch_of_any_size(
    dtype: torch.dtype, tolerance: float, native_folder: Path
) -> None:
    model = dense("llama", dtype, quantization="int4", compile_in=native_folder)

    def first_steps(batch: int) -> torch.Tensor:
        kv, paged = model.make_kv(batch, 4), PagedSequences(batch, 4)
        step = paged.step({str(row): (row * 7 + 5) % VOCAB for row in range(batch)}, {})
        return model.forward(step, kv)

    together = first_steps(40)
    for batch in (1, 2, 3, 4, 5, 8, 9, 13, 16, 17, 22, 32):
        alone = first_steps(batch)
        assert (alone - together[:batch]).norm() / alone.norm() < tolerance


def test_it_is_refused_without_compiled_code() -> None:
    with pytest.raises(InvalidConfig, match="quantization") as caught:
        EngineConfig(quantization="int4")
    assert "compile" in str(caught.value)
    assert EngineConfig(quantization="int4", compile=True).quantization == "int4"
    with pytest.raises(ModelLoadError, match=r"quantization='int4' needs compile=True"):
        dense("llama", quantization="int4")


def test_a_size_that_does_not_fill_groups_is_refused(native_folder: Path) -> None:
    spec = "dummy:llama?num_hidden_layers=1&intermediate_size=72&num_attention_heads=2"
    with pytest.raises(ModelLoadError, match="intermediate_size = 72"):
        load_model(spec, quantization="int4", compile=True, cache_dir=native_folder)
