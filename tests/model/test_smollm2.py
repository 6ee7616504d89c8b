"""The default model, loaded through the public loader into the user's cache."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from paged_steps import PagedSequences, greedy

from aiosched.model.dense_model import DenseModel
from aiosched.model.loader import load_model
from aiosched.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def smollm2() -> DenseModel:
    return load_model("smollm2-135m-instruct", dtype="float32")


def tokens(model: DenseModel, text: str) -> list[str]:
    backend = model.tokenizer.backend_tokenizer
    encoding = backend.encode(text)
    assert backend.decode(encoding.ids, skip_special_tokens=False) == text
    return encoding.tokens


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # "Ġ" is a space and "Ċ" a line break. Digits stand alone, and so does what is between
        # them and the word before: all spaces of a run together, none stuck to a digit.
        ("a 12 b", ["a", "Ġ", "1", "2", "Ġb"]),
        ("in 1999 and 2024", ["in", "Ġ", "1", "9", "9", "9", "Ġand", "Ġ", "2", "0", "2", "4"]),
        ("x  3", ["x", "ĠĠ", "3"]),
        ("x\n  34", ["x", "ĊĠĠ", "3", "4"]),
        ("7 8", ["7", "Ġ", "8"]),
    ],
)
def test_each_digit_is_a_token_and_the_space_before_it_another(
    smollm2: DenseModel, text: str, expected: list[str]
) -> None:
    assert tokens(smollm2, text) == expected


def test_chat_markers_are_single_tokens(smollm2: DenseModel) -> None:
    text = Tokenizer(smollm2.tokenizer).render_chat([{"role": "user", "content": "hi"}])
    assert text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert tokens(smollm2, text).count("<|im_start|>") == 3
    assert smollm2.tokenizer.eos_token == "<|im_end|>"
    assert smollm2.eos_token_ids == (smollm2.tokenizer.eos_token_id,)


def test_it_knows_the_capital_of_france(smollm2: DenseModel) -> None:
    backend = smollm2.tokenizer.backend_tokenizer
    (token,) = greedy(smollm2, backend.encode("The capital of France is").ids, 1)
    assert backend.decode([token]) == " Paris"


def test_its_shape_is_the_published_one(smollm2: DenseModel) -> None:
    assert len(smollm2.layers) == 30
    assert smollm2.vocab_size == 49_152
    assert smollm2.max_model_len == 8192
    assert smollm2.kv_bytes_per_token() == 30 * 2 * 3 * 64 * 4


TEXT = (
    "The sun is a star. It is much bigger than the Earth, and it gives us light and heat. Plants "
    "use the light of the sun to grow, and animals eat the plants. Without the sun there would be "
    "no life on our planet. At night we cannot see the sun, because the Earth has turned, and we "
    "look out into space, where we can see the moon and many other stars."
)


def likeliest(model: DenseModel) -> torch.Tensor:
    """The token that the model expects after each one of ``TEXT``."""
    ids = model.tokenizer.backend_tokenizer.encode(TEXT).ids
    inputs = PagedSequences(8, 16).step({}, {"a": ids})
    every = replace(inputs, logits_index=torch.arange(len(ids)))
    return model.forward(every, model.make_kv(8, 16)).argmax(-1)


def test_bfloat16_and_int8_mostly_expect_the_tokens_that_float32_does(
    smollm2: DenseModel,
) -> None:
    expected = likeliest(smollm2)
    for quantization, least in (("none", 0.9), ("int8", 0.8)):
        model = load_model("smollm2-135m-instruct", dtype="bfloat16", quantization=quantization)
        agreement = float((likeliest(model) == expected).float().mean())
        assert agreement >= least, (quantization, agreement)
