"""The byte-level alphabet of GPT-2 style vocabularies, and the text of each token in it.

Such a vocabulary writes each byte as one printable character, so a token is a string of bytes that
may begin or end inside a UTF-8 character. (Radford et al., *Language Models are Unsupervised
Multitask Learners*, 2019, section 2.2.)
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any


def _alphabet() -> dict[str, int]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + i): byte for i, byte in enumerate(others)
    }


BYTE_OF = _alphabet()


def piece_bytes(piece: str) -> bytes:
    """The bytes that a vocabulary entry stands for.

    An added token is kept as plain text, and the decoder does not know which entries are added:
    a piece with any character outside the alphabet is taken as it is written, whole.
    """
    try:
        return bytes([BYTE_OF[char] for char in piece])
    except KeyError:
        return piece.encode()


class PieceTable(list["str | bytes | None"]):
    """Token id → what it adds: text if its bytes are whole characters, else the bytes.

    Entries are ``None`` until first asked for by ``entry``, so that a vocabulary of 250,000 costs
    little up front; one table serves all requests of a tokenizer. A list and not a dictionary: it
    is looked into once for each token of each stream, and ids are dense.
    """

    def __init__(self, backend: Any, size: int, skipped: Set[int]) -> None:
        super().__init__([None] * size)
        self._backend = backend
        self._skipped = skipped

    def entry(self, token_id: int) -> str | bytes:
        """What ``token_id`` adds. Skipped and unknown ids add nothing."""
        known = 0 <= token_id < len(self)
        entry = self[token_id] if known else None
        if entry is None:
            entry = self._make(token_id)
            if known:
                self[token_id] = entry
        return entry

    def _make(self, token_id: int) -> str | bytes:
        piece = self._backend.id_to_token(token_id) if 0 <= token_id < 2**32 else None
        if piece is None or token_id in self._skipped:
            return ""
        data = piece_bytes(piece)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return data
