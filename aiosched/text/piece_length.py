"""chars_per_token: how much text a token can stand for, at most.

A text with more characters than the model's length times this can be refused unread. That must
never hit a text which fits, so the answer is ``None`` unless everything about the tokenizer is
known: byte-level BPE, whose tokens spell the text byte by byte. Some vocabularies lack bytes that
hardly occur; these are lost in silence, and ``lost_chars`` names the characters that go with them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from aiosched.text.byte_level import BYTE_OF

_CONTINUATION = range(0x80, 0xC0)  # every character of several bytes has one of these (UTF-8)

NFC_SHRINKS = 4
"""NFC makes one character of at most four (U+1F82 is alpha, two accents and a iota)."""


def chars_per_token(backend: Any, vocabulary: Mapping[str, int]) -> int | None:
    """The most characters of a text that one token covers, those of ``lost_chars`` left aside.

    ``None`` if there may be no such number.

    Args:
        backend: a ``tokenizers.Tokenizer``.
        vocabulary: piece → id, added tokens included.
    """
    normalizers = {part["type"] for part in _parts(backend.normalizer)}
    splitters = list(_parts(backend.pre_tokenizer))
    spells_every_byte = (
        type(backend.model).__name__ == "BPE"
        and [part["type"] for part in _parts(backend.decoder)] == ["ByteLevel"]
        and not any(byte in _CONTINUATION for byte in _lacking(vocabulary))
        and normalizers <= {"NFC"}
        and {part["type"] for part in splitters} <= {"ByteLevel", "Digits", "Split"}
        and all(part.get("behavior") != "Removed" for part in splitters)
    )
    added = backend.get_added_tokens_decoder().values()
    if not spells_every_byte or any(token.lstrip or token.rstrip for token in added):
        return None  # a token that strips takes any amount of blanks with it
    return max(map(len, vocabulary)) * (NFC_SHRINKS if normalizers else 1)


def lost_chars(vocabulary: Mapping[str, int]) -> str:
    """Characters that a byte-level vocabulary cannot spell, and that become no token at all.

    Only one byte can be lost without a trace, if all bytes that go on with a character are there.
    """
    return "".join(chr(byte) for byte in _lacking(vocabulary) if byte < 0x80)


def _lacking(vocabulary: Mapping[str, int]) -> list[int]:
    return [byte for char, byte in BYTE_OF.items() if char not in vocabulary]


def _parts(component: Any) -> Iterator[dict[str, Any]]:
    """The settings of a part of the tokenizer, or of each part in a sequence of them."""
    if component is None:
        return
    try:
        state = json.loads(component.__getstate__())
    except Exception:  # written in Python
        yield {"type": "unknown"}
        return
    for key in ("normalizers", "pretokenizers", "decoders"):
        if key in state:
            yield from state[key]
            return
    yield state
