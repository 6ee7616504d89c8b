"""The dense family in few operations gives what transformers gives on the same weights."""

from __future__ import annotations

import pytest
import torch
from dense_models import FAMILIES, SMALL, dense, logits_of_mixed_steps, original
from paged_steps import greedy
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from aiosched.errors import ModelLoadError
from aiosched.model.dense_model import DenseModel
from aiosched.model.loader import load_model
from aiosched.model.transformers_dense import is_dense
from aiosched.model.transformers_model import TransformersModel
from aiosched.model.weights import in_int8

LLAMA = (
    "dummy:llama?hidden_size=32&intermediate_size=48&num_hidden_layers=1&num_attention_heads=2"
    "&vocab_size=61"
)
GPT2 = "dummy:gpt2?n_embd=32&n_layer=1&n_head=2&vocab_size=61"


@pytest.mark.parametrize("name", FAMILIES)
def test_in_float32_tokens_and_logits_equal_those_of_transformers(name: str) -> None:
    model, reference = dense(name), TransformersModel(original(name))

    assert greedy(model, [5, 6, 7], 24) == greedy(reference, [5, 6, 7], 24)
    for sequences in (1, 5):
        expected = logits_of_mixed_steps(reference, sequences)
        for got, wanted in zip(logits_of_mixed_steps(model, sequences), expected, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_stay_near_float32(dtype: torch.dtype) -> None:
    expected = logits_of_mixed_steps(dense("llama"), 5)
    for got, wanted in zip(logits_of_mixed_steps(dense("llama", dtype), 5), expected, strict=True):
        assert (got - wanted).norm() / wanted.norm() < 0.05


def test_the_loader_takes_it_for_the_dense_family_on_the_cpu() -> None:
    assert isinstance(load_model(LLAMA), DenseModel)
    assert isinstance(load_model(GPT2), TransformersModel)


@pytest.mark.parametrize(
    "changed",
    [
        {"hidden_act": "gelu"},
        {"mlp_bias": True},
        {"is_causal": False},
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}},
        {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    ],
    ids=str,
)
def test_what_it_does_not_compute_is_left_to_transformers(changed: dict[str, object]) -> None:
    assert is_dense(LlamaForCausalLM(LlamaConfig(**SMALL)))
    assert not is_dense(LlamaForCausalLM(LlamaConfig(**{**SMALL, **changed})))


def test_sliding_windows_and_derived_classes_are_left_to_transformers() -> None:
    class Derived(LlamaForCausalLM):
        pass

    sliding = Qwen2Config(**SMALL, use_sliding_window=True, sliding_window=8, max_window_layers=0)
    assert is_dense(Qwen2ForCausalLM(Qwen2Config(**SMALL)))
    assert not is_dense(Qwen2ForCausalLM(sliding))
    assert not is_dense(Derived(LlamaConfig(**SMALL)))


def test_int8_rows_are_within_half_a_step_of_what_they_were() -> None:
    rows = torch.randn(8, 64) * torch.logspace(-4, 2, 8)[:, None]
    rows[3] = 0
    weights = in_int8(rows, None)
    assert weights.rows.dtype == torch.int8 and weights.scale is not None
    error = (weights.dequantized(torch.float32) - rows).abs()
    assert (error <= 0.501 * weights.scale[:, None]).all()
    assert (error[3] == 0).all()


@pytest.mark.parametrize("sequences", [1, 4, 5, 20])
def test_int8_stays_near_bfloat16_for_few_rows_and_for_many(sequences: int) -> None:
    expected = logits_of_mixed_steps(dense("llama, biases, tied", torch.bfloat16), sequences)
    model = dense("llama, biases, tied", torch.bfloat16, quantization="int8")
    for got, wanted in zip(logits_of_mixed_steps(model, sequences), expected, strict=True):
        assert (got - wanted).norm() / wanted.norm() < 0.08


def test_a_quantization_that_it_does_not_know_is_refused_by_name() -> None:
    with pytest.raises(ModelLoadError, match=r"'int2' is not one of int8"):
        dense("llama", torch.bfloat16, quantization="int2")


def test_int8_without_bfloat16_or_compiled_code_is_refused() -> None:
    with pytest.raises(ModelLoadError, match=r"int8.*bfloat16.*compile=True"):
        load_model(LLAMA, dtype="float32", quantization="int8")


@pytest.mark.parametrize("options", [{"quantization": "int8"}, {"compile": True}])
def test_other_families_and_devices_are_refused_by_name(options: dict[str, object]) -> None:
    with pytest.raises(ModelLoadError, match=rf"with {next(iter(options))}.*dense llama"):
        load_model(GPT2, **options)
    with pytest.raises(ModelLoadError, match=rf"{next(iter(options))} on cuda.*CPU"):
        load_model(LLAMA, **options, device="cuda")
