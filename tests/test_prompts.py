"""PromptEncoder: text, ids and chat to token ids, or a refusal that says what is wrong."""

from __future__ import annotations

import asyncio
import threading
import time

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from aiosched import InvalidRequest, PromptTooLong
from aiosched.prompts import LargeText, PromptEncoder
from aiosched.text.byte_level import BYTE_OF
from aiosched.text.tokenizer import LARGE_TEXT_CHARS, Tokenizer


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
        [{"role": "user", "content": "a"}, 1],
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


def test_a_long_prompt_of_ids_is_read_in_an_instant():
    """C61: tens of thousands of ids are one array operation, not a look at each."""
    ids, roomy = [1] * 100_000, encoder(max_model_len=200_000, kv_tokens=200_000)
    begun = time.thread_time()
    assert len(roomy.encode(ids)) == 100_000
    assert time.thread_time() - begun < 0.03


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


class ThreadedLetters(Letters):
    """Knows in which threads it was called."""

    def __init__(self):
        self.threads = set()

    def encode(self, text, *, add_special_tokens=True):
        self.threads.add(threading.current_thread().name)
        return super().encode(text, add_special_tokens=add_special_tokens)

    def render_chat(self, messages):
        self.threads.add(threading.current_thread().name)
        return super().render_chat(messages)


@pytest.mark.parametrize("special", [True, False])
def test_a_large_prompt_is_handed_back_to_be_encoded_off_the_loop(special):
    """Also by a tokenizer that has no threads of its own. A conversation is rendered there, too."""
    text, tokenizer = "a" * LARGE_TEXT_CHARS, ThreadedLetters()
    roomy = encoder(tokenizer, max_model_len=2 * LARGE_TEXT_CHARS, kv_tokens=2 * LARGE_TEXT_CHARS)
    large = roomy.encode(text if special else [{"role": "user", "content": text}])
    assert isinstance(large, LargeText)
    ids = asyncio.run(roomy.encode_large(large))
    assert len(ids) == LARGE_TEXT_CHARS + special
    assert tokenizer.threads == {"aiosched-tokenizer"}


def test_a_conversation_of_many_turns_is_large_and_may_be_changed_meanwhile():
    turns = [{"role": "user", "content": "a"} for _ in range(100)]
    roomy = encoder(Letters(), max_model_len=200)
    large = roomy.encode(turns)
    turns[0]["content"] = ""
    turns.clear()
    assert asyncio.run(roomy.encode_large(large)).tolist() == [1] * 100


def test_a_text_that_cannot_fit_is_refused_unread():
    spelled = [char for char in BYTE_OF if BYTE_OF[char] != 4]
    backend = Backend(models.BPE(vocab={char: i for i, char in enumerate(spelled)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))
    small = encoder(tokenizer, vocab_size=256, max_model_len=11)
    assert len(small.encode("a" * 10 + "\x04" * 90)) == 10  # a byte that the vocabulary lacks
    tokenizer.encode = None
    with pytest.raises(InvalidRequest, match="at most 10 characters: more never fit 10 tokens"):
        small.encode("a" * 11)


def test_a_list_that_cannot_fit_is_refused_unread():
    with pytest.raises(PromptTooLong):
        encoder().encode(range(10**15))


def test_a_large_text_that_does_not_fit_is_refused_by_encode_large():
    small = encoder(Letters())
    large = small.encode("a" * LARGE_TEXT_CHARS)
    with pytest.raises(PromptTooLong):
        asyncio.run(small.encode_large(large))
