"""Deltas join to the whole decode, exactly, and never end inside a character."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from aiosched.text.byte_level import BYTE_OF
from aiosched.text.detokenizer import (
    ByteLevelDetokenizer,
    IncrementalDetokenizer,
    WindowDetokenizer,
    make_detokenizer,
)
from aiosched.text.tokenizer import Tokenizer

CORPUS = ["the cat sat on the mat, the end", "A 世ab👨‍👩‍👧é", "naïve café — 世界 世界"] * 4
FAMILY = "A 世ab👨‍👩‍👧é"
REPLACEMENT = "\ufffd"


def wrap(backend: Backend) -> Tokenizer:
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))


def add_tokens(backend: Backend) -> None:
    backend.add_special_tokens(["<s>", "<|end of text|>"])
    # In the alphabet as a whole, outside it by a space, outside it by a letter, and both at once.
    backend.add_tokens([AddedToken(t, normalized=False) for t in ("<tool>", "é x", "世!", "Ġ世")])


@cache
def byte_level() -> Tokenizer:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=340, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    add_tokens(backend)
    return wrap(backend)


def sentencepiece_like(decoder: decoders.Decoder) -> Tokenizer:
    pieces = ["▁", "▁the", "▁▁", "cat", "s", "▁世", REPLACEMENT, ".", "<0x41"]
    pieces += [f"<0x{byte:02X}>" for byte in range(256)]
    backend = Backend(models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[]))
    backend.decoder = decoder
    add_tokens(backend)
    return wrap(backend)


@cache
def llama() -> Tokenizer:
    steps = [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
    return sentencepiece_like(decoders.Sequence(steps))


@cache
def gemma() -> Tokenizer:
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    return sentencepiece_like(decoders.Sequence(steps))


@cache
def metaspace() -> Tokenizer:
    return sentencepiece_like(decoders.Metaspace())


@cache
def wordpiece() -> Tokenizer:
    words = ["[UNK]", "the", "cat", "##s", ".", "'", "do", "n't"]
    backend = Backend(models.WordPiece({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    add_tokens(backend)
    return wrap(backend)


@cache
def fused_byte_level() -> Tokenizer:
    """Byte-level behind another decoder: the window has to cope with split characters."""
    pieces = sorted(BYTE_OF)
    backend = Backend(models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[]))
    backend.decoder = decoders.Sequence([decoders.Fuse(), decoders.ByteLevel()])
    return wrap(backend)


TOKENIZERS: list[Callable[[], Tokenizer]] = [
    byte_level,
    llama,
    gemma,
    metaspace,
    wordpiece,
    fused_byte_level,
]


def check(tokenizer: Tokenizer, ids: list[int], skip: bool) -> None:
    whole = tokenizer.decode(ids, skip_special_tokens=skip)
    detokenizer = make_detokenizer(tokenizer, skip_special_tokens=skip)
    text, pieces = "", detokenizer.pieces
    for token_id in ids:
        known = pieces[token_id] if token_id < len(pieces) else None
        alone = isinstance(known, str) and not detokenizer.held
        text += (added := detokenizer.push(token_id))
        assert not alone or known == added
        assert whole.startswith(text)
    assert text + detokenizer.flush() == whole


@pytest.mark.parametrize("make", TOKENIZERS)
@settings(deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_deltas_join_to_the_whole(
    make: Callable[[], Tokenizer], data: st.DataObject, skip: bool
) -> None:
    tokenizer = make()
    ids = st.integers(0, tokenizer.vocab_size + 1)  # beyond the vocabulary too
    check(tokenizer, data.draw(st.lists(ids, max_size=40)), skip)


@pytest.mark.parametrize("make", TOKENIZERS)
@settings(deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_pushing_many_is_pushing_each(
    make: Callable[[], Tokenizer], data: st.DataObject, skip: bool
) -> None:
    tokenizer = make()
    ids = st.integers(0, tokenizer.vocab_size - 1)
    groups = data.draw(st.lists(st.lists(ids, max_size=20), max_size=5))
    one, many = make_detokenizer(tokenizer, skip), make_detokenizer(tokenizer, skip)
    for group in groups:
        assert many.push_many(group) == "".join(map(one.push, group))
    assert many.flush() == one.flush()


@settings(deadline=None)
@given(data=st.binary(max_size=40))
def test_invalid_utf8_is_replaced_as_by_the_whole_decode(data: bytes) -> None:
    tokenizer = byte_level()
    names = {byte: char for char, byte in BYTE_OF.items()}
    vocab = tokenizer._backend.get_vocab()
    ids = [vocab[names[byte]] for byte in data]
    assert tokenizer.decode(ids) == data.decode(errors="replace")
    check(tokenizer, ids, skip=True)


@settings(deadline=None)
@given(data=st.lists(st.sampled_from([0x41, 0x80, 0xBF, 0xE4, 0xB8, 0x96, 0xF0, 0x9F, 0xED])))
def test_a_run_of_byte_tokens_is_valid_or_not_as_a_whole(data: list[int]) -> None:
    tokenizer = llama()
    vocab = tokenizer._backend.get_vocab()
    ids = [vocab["▁the"], *(vocab[f"<0x{byte:02X}>"] for byte in data), vocab["cat"]]
    check(tokenizer, ids, skip=True)


@settings(deadline=None)
@given(cuts=st.lists(st.integers(1, len(FAMILY.encode()) - 1), max_size=12))
def test_c69_no_delta_holds_half_a_character(cuts: list[int]) -> None:
    data = FAMILY.encode()
    edges = [0, *sorted(set(cuts)), len(data)]
    names = {byte: char for char, byte in BYTE_OF.items()}
    pieces = ["".join(names[byte] for byte in data[a:b]) for a, b in pairwise(edges)]
    vocab = {piece: i for i, piece in enumerate(dict.fromkeys([*pieces, *names.values()]))}
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.decoder = decoders.ByteLevel()
    detokenizer = make_detokenizer(wrap(backend))
    deltas = [detokenizer.push(vocab[piece]) for piece in pieces]
    assert all(REPLACEMENT not in delta for delta in deltas)
    assert "".join(deltas) == FAMILY
    assert detokenizer.flush() == ""
    # Held no longer than needed: each delta has every character that is complete by then.
    for i in range(len(pieces)):
        complete = data[: edges[i + 1]].decode(errors="ignore")
        assert "".join(deltas[: i + 1]) == complete


def never_complete() -> list[tuple[IncrementalDetokenizer, Tokenizer, int]]:
    byte, fused, fallback = byte_level(), fused_byte_level(), llama()
    continuation = next(char for char, value in BYTE_OF.items() if value == 0x80)
    return [
        (make_detokenizer(byte), byte, byte._backend.token_to_id(continuation)),
        (make_detokenizer(fused), fused, fused._backend.token_to_id(continuation)),
        (make_detokenizer(fallback), fallback, fallback._backend.token_to_id("<0x80>")),
    ]


@pytest.mark.parametrize("which", [0, 1, 2])
def test_c70_tokens_that_never_complete_a_character_take_constant_time(which: int) -> None:
    detokenizer, tokenizer, token_id = never_complete()[which]
    parts: list[str] = []
    seconds: list[float] = []
    for _ in range(20):
        start = time.process_time()
        parts += [detokenizer.push(token_id) for _ in range(1_000)]
        seconds.append(time.process_time() - start)
    assert "".join(parts) + detokenizer.flush() == tokenizer.decode([token_id] * 20_000)
    assert min(seconds[-5:]) < 5 * min(seconds[:5]) + 0.001


@pytest.mark.parametrize("make", [llama, gemma, metaspace])
def test_what_a_window_decodes_does_not_grow(make: Callable[[], Tokenizer]) -> None:
    tokenizer = make()
    sizes: list[int] = []

    def decode(ids: list[int]) -> str:
        sizes.append(len(ids))
        return tokenizer.decode(ids)

    detokenizer = WindowDetokenizer(decode, lambda _: False, tokenizer.byte_fallback_ids)
    ids = [tokenizer._backend.token_to_id(piece) for piece in ("▁", "▁the", "cat")] * 300
    text = "".join(map(detokenizer.push, ids)) + detokenizer.flush()
    assert text == tokenizer.decode(ids)
    assert max(sizes) <= 16


def test_a_token_after_many_without_text_is_not_taken_for_the_first() -> None:
    pieces = ["a", "", " b"]

    def decode(ids: list[int]) -> str:
        return "".join(pieces[i] for i in ids).removeprefix(" ")

    detokenizer = WindowDetokenizer(decode, lambda _: False)
    deltas = [detokenizer.push(i) for i in [0] * 16 + [1] * 40 + [2]]
    assert deltas[-1] == " b"


def test_only_the_first_token_of_a_text_loses_its_space() -> None:
    tokenizer = llama()
    special, the = map(tokenizer._backend.token_to_id, ("<s>", "▁the"))
    detokenizer = make_detokenizer(tokenizer)
    assert [detokenizer.push(i) for i in (special, the, the)] == ["", "the", " the"]


def test_c70_text_of_the_prompt_is_in_no_delta() -> None:
    tokenizer = byte_level()
    names = {byte: char for char, byte in BYTE_OF.items()}
    ids = [tokenizer._backend.token_to_id(names[byte]) for byte in "世x".encode()]
    detokenizer = make_detokenizer(tokenizer)  # the prompt ended after the character's first byte
    deltas = "".join(map(detokenizer.push, ids[1:]))
    assert deltas == tokenizer.decode(ids[1:])
    assert "世" not in deltas


def test_byte_level_tokenizers_take_the_fast_path_and_share_a_table() -> None:
    tokenizer = byte_level()
    assert isinstance(make_detokenizer(tokenizer), ByteLevelDetokenizer)
    assert tokenizer.piece_table(True) is tokenizer.piece_table(True)
    assert tokenizer.piece_table(True) is not tokenizer.piece_table(False)
    assert llama().piece_table(True) is None


def test_an_added_token_is_mapped_whole_or_not_at_all() -> None:
    tokenizer = byte_level()
    added = json.loads(tokenizer._backend.to_str())["added_tokens"]
    ids = [token["id"] for token in added if not token["special"]]
    detokenizer = make_detokenizer(tokenizer)
    # "<tool>" is in the alphabet. A space or a CJK letter is not: those stay as written, even
    # where a single "Ġ" would have become a space and "é" the byte E9.
    assert [detokenizer.push(i) for i in ids] == ["<tool>", "é x", "世!", "Ġ世"]


class Words:
    """A plugged tokenizer: nothing but the protocol."""

    vocab_size = 3
    eos_token_ids = (2,)
    special_ids = frozenset({2})
    chat_template = None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [["a", "b"].index(word) for word in text.split()]

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return " ".join(["a", "b", "<end>"][i] for i in ids if not (skip_special_tokens and i == 2))

    def render_chat(self, messages: object, add_generation_prompt: bool = True) -> str:
        raise NotImplementedError


def test_any_tokenizer_of_the_protocol_can_be_streamed() -> None:
    ids = [0, 1, 2, 1] * 20
    detokenizer = make_detokenizer(Words())
    assert "".join(map(detokenizer.push, ids)) + detokenizer.flush() == Words().decode(ids)
