"""Token ids to text, a token at a time, for streams.

Contract of every detokenizer here: a delta never ends inside a character and is never taken back,
and all deltas joined, with the flush, are exactly what decoding all the ids at once gives. It
follows that text is held back while later tokens can still change it, and no longer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from codecs import utf_8_decode
from collections.abc import Callable, Iterable, Sequence, Set

from aiosched.text.byte_level import PieceTable
from aiosched.text.tokenizer import Tokenizer, TokenizerLike

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_CONTEXT = 8  # tokens; more than the bytes of a character, so that the end of a window is right
_LONGEST = 64


class IncrementalDetokenizer(ABC):
    """The text of one answer, as it grows. Constant time a token.

    Attributes:
        pieces: by token id: a string is all that the token adds while ``held`` is empty. Whoever
            finds it there need not ``push`` the token; anything else must be pushed.
        held: bytes of a character that is not whole yet.
    """

    # Set on each object, and not here: Python's fast path for attributes needs that.
    pieces: Sequence[str | bytes | None]
    held: bytes

    def __init__(self, pieces: Sequence[str | bytes | None] = ()) -> None:
        self.pieces = pieces
        self.held = b""

    @abstractmethod
    def push(self, token_id: int) -> str:
        """Add a token; return the text that became certain, maybe none."""

    @abstractmethod
    def push_many(self, ids: Iterable[int]) -> str:
        """Add several tokens at once; the same as pushing each, and cheaper."""

    @abstractmethod
    def flush(self) -> str:
        """Return what is still held: an incomplete character becomes U+FFFD. Call it last."""


def make_detokenizer(
    tokenizer: TokenizerLike, skip_special_tokens: bool = True
) -> IncrementalDetokenizer:
    """A new detokenizer for one answer, of the kind that the tokenizer's decoder needs."""
    skipped = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
    if not isinstance(tokenizer, Tokenizer):
        return WindowDetokenizer(
            lambda ids: tokenizer.decode(ids, skip_special_tokens), skipped.__contains__
        )
    pieces = tokenizer.piece_table(skip_special_tokens)
    if pieces is not None:
        return ByteLevelDetokenizer(pieces)
    return WindowDetokenizer(
        lambda ids: tokenizer.decode(ids, skip_special_tokens),
        lambda token_id: token_id in skipped or not tokenizer.knows(token_id),
        tokenizer.byte_fallback_ids,
    )


class ByteLevelDetokenizer(IncrementalDetokenizer):
    """For byte-level vocabularies: a table look-up, and UTF-8 decoded as it arrives.

    Python replaces invalid UTF-8 as Rust's ``from_utf8_lossy`` does, one U+FFFD for each maximal
    part of a character (Unicode 15, section 3.9, table 3-8), so at most 3 bytes are ever held.
    """

    def __init__(self, pieces: PieceTable) -> None:
        super().__init__(pieces)
        self._table = pieces

    def push(self, token_id: int) -> str:
        piece = self._table.entry(token_id)
        if isinstance(piece, str):
            if not self.held:
                return piece
            piece = piece.encode()
        return self._decoded(piece)

    def push_many(self, ids: Iterable[int]) -> str:
        pieces = map(self._table.entry, ids)
        return self._decoded(b"".join([p.encode() if isinstance(p, str) else p for p in pieces]))

    def flush(self) -> str:
        held, self.held = self.held, b""
        return held.decode(errors="replace")

    def _decoded(self, data: bytes) -> str:
        """The whole characters of what is held and ``data``; the rest is held."""
        data = self.held + data
        text, consumed = utf_8_decode(data, "replace", False)
        self.held = data[consumed:]
        return text


class NoText(IncrementalDetokenizer):
    """For a model without a tokenizer."""

    def push(self, token_id: int) -> str:
        return ""

    def push_many(self, ids: Iterable[int]) -> str:
        return ""

    def flush(self) -> str:
        return ""


class WindowDetokenizer(IncrementalDetokenizer):
    """For all other decoders: decode the last few tokens again with each new one.

    The window keeps some tokens whose text is out already, since a decoder may treat the first
    token of a text apart (a leading space is dropped). What is held back:

    - one U+FFFD at the end, which may be the start of a character;
    - a whole run of byte tokens (``<0xE4>``) until it ends: a single invalid byte turns *each*
      byte of its run into U+FFFD, the valid characters before it included.

    Args:
        decode: the whole decode.
        ignored: says of an id that ``decode`` passes over it.
        byte_ids: the byte tokens, if ``decode`` joins them in runs.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        ignored: Callable[[int], bool],
        byte_ids: Set[int] = frozenset(),
    ) -> None:
        super().__init__()
        self._decode = decode
        self._ignored = ignored
        self._byte_ids = byte_ids
        self._run: list[int] = []
        self._window: list[int] = []
        self._shown = 0  # characters of the window's text that are out

    def push(self, token_id: int) -> str:
        return self.push_many((token_id,))

    def push_many(self, ids: Iterable[int]) -> str:
        before = len(self._window)
        for token_id in ids:
            if self._ignored(token_id):
                continue
            self._run.append(token_id)
            if token_id not in self._byte_ids:
                self._window += self._run
                self._run.clear()
        if len(self._window) == before:
            return ""
        text = _certain(self._decode(self._window))
        delta = text[self._shown :]
        self._shown = max(self._shown, len(text))
        self._shorten()
        return delta

    def flush(self) -> str:
        self._window += self._run
        delta = self._decode(self._window)[self._shown :]
        self._run, self._window, self._shown = [], [], 0
        return delta

    def _shorten(self) -> None:
        if len(self._window) < 2 * _CONTEXT:
            return
        tail = self._window[-_CONTEXT:]
        text = _certain(self._decode(tail))
        # Without text, the next token would be the first of its text and lose its space.
        if text or len(self._window) >= _LONGEST:
            self._window, self._shown = tail, len(text)


def _certain(text: str) -> str:
    return text.removesuffix(_REPLACEMENT)
