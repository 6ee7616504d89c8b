"""Tokenizer: text to token ids and back, with large texts encoded off the event loop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from aiosched.errors import EngineClosed, InvalidRequest
from aiosched.text.byte_level import PieceTable
from aiosched.text.chat import prepare_template, render_chat
from aiosched.text.piece_length import chars_per_token, lost_chars

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

LARGE_TEXT_CHARS = 2_048
"""Texts and conversations from this length on are encoded in a thread: they take milliseconds."""

T = TypeVar("T")

_HEX = "0123456789abcdefABCDEF"


class TokenizerLike(Protocol):
    """What the engine asks of a tokenizer; a plugged model may bring its own.

    For large prompts ``encode`` and ``render_chat`` are called in a thread, by one thread at a
    time, while the event loop goes on to call whatever it needs.
    """

    @property
    def special_ids(self) -> frozenset[int]:
        """The ids that ``decode(..., skip_special_tokens=True)`` leaves out."""

    @property
    def chat_template(self) -> str | None:
        """The Jinja2 source of the model's chat template, if it has one."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Raises InvalidRequest if it cannot be encoded."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids."""

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True
    ) -> str:
        """Text of a conversation. Raises InvalidRequest if it cannot be rendered."""


class Tokenizer:
    """A Hugging Face fast tokenizer, with a few threads of its own for large texts.

    The threads start at the first :meth:`off_loop` and end with :meth:`close`. Hand the
    tokenizer over: padding and truncation that others set on it are switched off again.

    Args:
        tokenizer: a fast tokenizer of ``transformers``.
        eos_token_ids: further ids that end an answer, such as those of a generation config.
        threads: the most threads that encode at once.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        *,
        eos_token_ids: Iterable[int] = (),
        threads: int = 2,
    ) -> None:
        self._hf: Any = tokenizer
        self._backend: Any = self._hf.backend_tokenizer
        eos = self._hf.eos_token_id
        self.eos_token_ids: tuple[int, ...] = tuple(
            dict.fromkeys([*([] if eos is None else [eos]), *eos_token_ids])
        )
        self.special_ids: frozenset[int] = frozenset(
            id for id, token in self._backend.get_added_tokens_decoder().items() if token.special
        )
        vocabulary = self._backend.get_vocab()
        self.vocab_size: int = 1 + max(vocabulary.values(), default=-1)
        self.chars_per_token = chars_per_token(self._backend, vocabulary)
        self.lost_chars = lost_chars(vocabulary)
        self._threads = threads
        self._pool: ThreadPoolExecutor | None = None
        self._closed = False
        self._under_way: set[Future[Any]] = set()
        self._tables: dict[bool, PieceTable] = {}

    @property
    def chat_template(self) -> str | None:
        """The Jinja2 source of the chat template; of several, the one named ``default``."""
        template = self._hf.chat_template
        return template.get("default") if isinstance(template, Mapping) else template

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``.

        Holds the GIL throughout, 1 to 4 µs a character: see :meth:`encode_without_gil`.

        Raises:
            InvalidRequest: ``text`` is not a string or holds a lone surrogate.
        """
        try:
            encoding = self._plain_backend().encode(text, add_special_tokens=add_special_tokens)
        except TypeError:
            raise _unencodable(text) from None
        ids: list[int] = encoding.ids
        return ids

    def encode_without_gil(
        self,
        text: str,
        *,
        add_special_tokens: bool = True,
        check_length: Callable[[int], None] | None = None,
    ) -> list[int]:
        """The same ids as :meth:`encode`; other threads run meanwhile. For a thread.

        Args:
            check_length: called with the number of tokens, and may raise, before there is a list
                of them: making one holds the GIL again, some 20 ns a token.

        Raises:
            InvalidRequest: ``text`` is not a string or holds a lone surrogate.
        """
        # `encode` holds the GIL for the whole text: a thread would not help. A batch releases it.
        try:
            (encoding,) = self._plain_backend().encode_batch_fast(
                [text], add_special_tokens=add_special_tokens
            )
        except TypeError:
            raise _unencodable(text) from None
        if check_length is not None:
            check_length(len(encoding))
        ids: list[int] = encoding.ids
        return ids

    async def off_loop(self, work: Callable[[], T]) -> T:
        """The result of ``work()``, done in one of the tokenizer's threads.

        Raises:
            EngineClosed: the tokenizer was closed before the work had its turn.
        """
        if self._closed:
            raise EngineClosed("the tokenizer is closed")
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="aiosched-tokenizer")
        future = self._pool.submit(work)
        self._under_way.add(future)
        future.add_done_callback(self._under_way.discard)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            if self._cancelled_by_close(future):
                raise EngineClosed("the tokenizer was closed") from None
            raise

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ``ids``, spaces left as they are. Ids outside the vocabulary add nothing."""
        return str(self._backend.decode(ids, skip_special_tokens=skip_special_tokens))

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True
    ) -> str:
        """Text of a conversation, by the model's template.

        The text has its special tokens already: encode it with ``add_special_tokens=False``.

        Raises:
            InvalidRequest: there is no template, or it does not take these messages.
        """
        template = self.chat_template
        if template is None:
            raise InvalidRequest("messages", messages, "a prompt: the model has no chat template")
        return render_chat(
            template,
            messages,
            bos_token=self._hf.bos_token or "",
            eos_token=self._hf.eos_token or "",
            add_generation_prompt=add_generation_prompt,
        )

    @property
    def busy(self) -> bool:
        """Whether a thread encodes: ``close`` would wait for it."""
        return bool(self._under_way)

    def warm_up(self) -> None:
        """Compile the chat template, which takes some 10 to 50 ms at first. For a thread."""
        if self.chat_template is not None:
            prepare_template(self.chat_template)

    def close(self) -> None:
        """Join the threads, after the text that each is at; what waits is cancelled."""
        self._closed = True
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=True, cancel_futures=True)

    def knows(self, token_id: int) -> bool:
        """Whether the vocabulary has this id."""
        return self._backend.id_to_token(token_id) is not None

    def piece_table(self, skip_special_tokens: bool) -> PieceTable | None:
        """Token id → text or bytes, shared by all requests; ``None`` if not byte-level."""
        if self._decoder_kinds != ("ByteLevel",):
            return None
        if skip_special_tokens not in self._tables:
            skipped = self.special_ids if skip_special_tokens else frozenset[int]()
            self._tables[skip_special_tokens] = PieceTable(self._backend, self.vocab_size, skipped)
        return self._tables[skip_special_tokens]

    @cached_property
    def byte_fallback_ids(self) -> frozenset[int]:
        """Ids of the tokens that are one byte each (``<0x0A>``), if the decoder joins them."""
        if "ByteFallback" not in self._decoder_kinds:
            return frozenset()
        # The decoder parses the digits with Rust's from_str_radix, which also takes a plus sign.
        names = (f"<0x{high}{low}>" for high in "+" + _HEX for low in _HEX)
        ids = map(self._backend.token_to_id, names)
        return frozenset(id for id in ids if id is not None)

    @cached_property
    def _decoder_kinds(self) -> tuple[str, ...]:
        """Type names of the decoder and its parts, in order; empty if it is not a built-in one."""
        try:
            state = json.loads(self._backend.decoder.__getstate__())
        except Exception:  # none set, or written in Python
            return ()
        return tuple(part["type"] for part in state.get("decoders", [state]))

    def _cancelled_by_close(self, future: Future[Any]) -> bool:
        task = asyncio.current_task()
        return self._closed and future.cancelled() and not (task and task.cancelling())

    def _plain_backend(self) -> Any:
        if self._backend.truncation is not None:
            self._backend.no_truncation()
        if self._backend.padding is not None:
            self._backend.no_padding()
        return self._backend


def _unencodable(text: object) -> InvalidRequest:
    if not isinstance(text, str):
        return InvalidRequest("prompt", text, "a string")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        found = f"U+{ord(text[error.start]):04X} at index {error.start}"
        excerpt = text[max(0, error.start - 20) : error.start + 20]
        return InvalidRequest("prompt", excerpt, f"text without lone surrogates ({found})")
    return InvalidRequest("prompt", text, "text that the tokenizer takes")
