"""PromptEncoder: text, ids and chat to token ids, or a refusal that says what is wrong."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from aiosched import InvalidRequest, PromptTooLong
from aiosched.prompts import LargeText, PromptEncoder
from aiosched.text.tokenizer import LARGE_TEXT_CHARS


class Letters:
    """Each letter is a token, a special one stands first, and a chat is its contents joined."""

    def encode(self, text, *, add_special_tokens=True):
        return ([0] if add_special_tokens else []) + [ord(c) - 96 for c in text]

    def render_chat(self, messages):
        return "".join(message["content"] for message in messages)


def encoder(tokenizer=None, *, vocab_size=64, max_model_len=32, kv_tokens=1024):
    return PromptEncoder(tokenizer, vocab_size, max_model_len, kv_tokens)


@pytest.mark.parametrize(
    "prompt",
    [[1, 2, 3], (1, 2, 3), range(1, 4), np.array([1, 2, 3]), np.array([1, 2, 3], dtype=np.uint8)],
    ids=["list", "tuple", "range", "int64", "uint8"],
)
def test_token_ids_come_in_any_sequence(prompt):
    ids = encoder().encode(prompt)
    assert (ids.tolist(), ids.dtype) == ([1, 2, 3], np.int32)


def test_the_prompt_is_copied_so_the_caller_may_reuse_its_array():
    array = np.array([1, 2, 3], dtype=np.int32)
    ids = encoder().encode(array)
    array[:] = 9
    assert ids.tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    "prompt",
    [
        [],
        (),
        "",
        None,
        5,
        b"ab",
        {1, 2},
        {"role": "user", "content": "a"},
        [1.0],
        [True, False],
        ["a"],
        [None],
        [[1, 2], [3]],
        [[1, 2], [3, 4]],
        [1, {"role": "user", "content": "a"}],
        np.array([[1, 2]]),
        np.array([1.5]),
        np.array([], dtype=np.int64),
        np.array(5),
    ],
    ids=repr,
)
def test_what_is_no_prompt_is_refused(prompt):
    with pytest.raises(InvalidRequest) as caught:
        encoder(Letters()).encode(prompt)
    assert caught.value.field == "prompt"


@pytest.mark.parametrize(("ids", "wrong"), [([3, -1], -1), ([3, 64, 65], 64), ([2**40], 2**40)])
def test_an_id_outside_the_vocabulary_is_named(ids, wrong):
    with pytest.raises(InvalidRequest, match=r"\[0, 64\)") as caught:
        encoder().encode(ids)
    assert caught.value.value == wrong


def test_an_id_too_large_for_any_integer_is_refused():
    with pytest.raises(InvalidRequest):
        encoder().encode([2**70])


def test_a_prompt_leaves_room_for_one_token_of_the_models_length():
    assert len(encoder(max_model_len=32).encode([1] * 31)) == 31
    with pytest.raises(PromptTooLong, match="max_model_len is 32") as caught:
        encoder(max_model_len=32).encode([1] * 32)
    assert (caught.value.tokens, caught.value.limit) == (32, 31)


def test_a_prompt_fits_the_kv_cache():
    assert len(encoder(kv_tokens=8).encode([1] * 8)) == 8
    with pytest.raises(PromptTooLong, match="KV cache") as caught:
        encoder(kv_tokens=8).encode([1] * 9)
    assert (caught.value.tokens, caught.value.limit) == (9, 8)


def test_text_gets_special_tokens_and_a_chat_has_them_in_its_template():
    assert encoder(Letters()).encode("ab").tolist() == [0, 1, 2]
    chat = [{"role": "system", "content": "ab"}, {"role": "user", "content": "c"}]
    assert encoder(Letters()).encode(chat).tolist() == [1, 2, 3]


@pytest.mark.parametrize("prompt", ["ab", [{"role": "user", "content": "ab"}]])
def test_text_needs_a_tokenizer(prompt):
    with pytest.raises(InvalidRequest, match="no tokenizer"):
        encoder().encode(prompt)


@pytest.mark.parametrize("special", [True, False])
def test_a_large_text_is_handed_back_to_be_encoded_off_the_loop(special):
    text = "a" * LARGE_TEXT_CHARS
    roomy = encoder(Letters(), max_model_len=2 * LARGE_TEXT_CHARS, kv_tokens=2 * LARGE_TEXT_CHARS)
    large = roomy.encode(text if special else [{"role": "user", "content": text}])
    assert isinstance(large, LargeText)
    ids = asyncio.run(roomy.encode_large(large))
    assert len(ids) == LARGE_TEXT_CHARS + special


def test_a_large_text_that_does_not_fit_is_refused_by_encode_large():
    small = encoder(Letters())
    large = small.encode("a" * LARGE_TEXT_CHARS)
    with pytest.raises(PromptTooLong):
        asyncio.run(small.encode_large(large))
