"""The default model, loaded through the public loader into the user's cache."""

from __future__ import annotations

import pytest
from paged_steps import greedy

from aiosched.model.loader import load_model
from aiosched.model.transformers_model import TransformersModel


@pytest.fixture(scope="session")
def smollm2() -> TransformersModel:
    return load_model("smollm2-135m-instruct", dtype="float32")


def tokens(model: TransformersModel, text: str) -> list[str]:
    ids = model.tokenizer(text)["input_ids"]
    assert model.tokenizer.decode(ids) == text
    return model.tokenizer.convert_ids_to_tokens(ids)


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
    smollm2: TransformersModel, text: str, expected: list[str]
) -> None:
    assert tokens(smollm2, text) == expected


def test_chat_markers_are_single_tokens(smollm2: TransformersModel) -> None:
    text = smollm2.tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert tokens(smollm2, text).count("<|im_start|>") == 3
    assert smollm2.tokenizer.eos_token == "<|im_end|>"
    assert smollm2.eos_token_ids == (smollm2.tokenizer.eos_token_id,)


def test_it_knows_the_capital_of_france(smollm2: TransformersModel) -> None:
    prompt = smollm2.tokenizer("The capital of France is")["input_ids"]
    (token,) = greedy(smollm2, prompt, 1)
    assert smollm2.tokenizer.decode([token]) == " Paris"


def test_its_shape_is_the_published_one(smollm2: TransformersModel) -> None:
    assert len(smollm2.layers) == 30
    assert smollm2.vocab_size == 49_152
    assert smollm2.max_model_len == 8192
    assert smollm2.kv_bytes_per_token() == 30 * 2 * 3 * 64 * 4
