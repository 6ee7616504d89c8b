"""chars_per_token: a bound that holds for every text, or none."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from aiosched.text.byte_level import BYTE_OF
from aiosched.text.piece_length import NFC_SHRINKS, chars_per_token, lost_chars


def byte_level() -> Tokenizer:
    """Every byte, and one merge: the longest token covers two characters."""
    vocabulary = {char: i for i, char in enumerate(BYTE_OF)} | {"ab": 256}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[("a", "b")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def bound(backend: Tokenizer) -> int | None:
    return chars_per_token(backend, backend.get_vocab())


def test_it_is_the_longest_piece() -> None:
    backend = byte_level()
    assert bound(backend) == 2
    assert len(backend.encode("ab" * 50).ids) == 50
    backend.add_special_tokens(["<|end|>"])
    assert bound(backend) == 7


@pytest.mark.parametrize(
    "splitter",
    [pre_tokenizers.Digits(), pre_tokenizers.Split(" ", "isolated")],
)
def test_splitting_takes_nothing_away(splitter: Any) -> None:
    backend = byte_level()
    backend.pre_tokenizer = pre_tokenizers.Sequence([splitter, backend.pre_tokenizer])
    assert bound(backend) == 2


def test_composition_shrinks_a_text_fourfold_at_most() -> None:
    backend = byte_level()
    backend.normalizer = normalizers.NFC()
    assert bound(backend) == 2 * NFC_SHRINKS
    longest = max(len(unicodedata.normalize("NFD", chr(i))) for i in range(0x110000))
    assert longest == NFC_SHRINKS


def test_control_characters_that_no_token_spells_do_not_count() -> None:
    vocabulary = {char: i for i, char in enumerate(BYTE_OF) if BYTE_OF[char] not in (4, 0xC0)}
    backend = byte_level()
    backend.model = models.BPE(vocab=vocabulary, merges=[])
    assert bound(backend) == 1
    assert lost_chars(vocabulary) == "\x04"
    assert len(backend.encode("\x04" * 10 + "\x05").ids) == 1


def no_bytes(backend: Tokenizer) -> Tokenizer:
    other = Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    other.pre_tokenizer, other.decoder = backend.pre_tokenizer, backend.decoder
    return other


def strips(backend: Tokenizer) -> Tokenizer:
    backend.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    return backend


def drops(backend: Tokenizer) -> Tokenizer:
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "removed"), backend.pre_tokenizer]
    )
    return backend


def normalizes(backend: Tokenizer) -> Tokenizer:
    backend.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Strip()])
    return backend


def other_decoder(backend: Tokenizer) -> Tokenizer:
    backend.decoder = decoders.Metaspace()
    return backend


@pytest.mark.parametrize("change", [no_bytes, strips, drops, normalizes, other_decoder])
def test_there_is_none_if_tokens_may_swallow_any_amount(
    change: Callable[[Tokenizer], Tokenizer],
) -> None:
    assert bound(change(byte_level())) is None
