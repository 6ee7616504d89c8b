"""Prompts: text, token ids or chat messages, to token ids."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from aiosched._threads import in_thread
from aiosched.errors import InvalidRequest, PromptTooLong
from aiosched.model.inputs import Int32Array
from aiosched.text.tokenizer import LARGE_TEXT_CHARS, Tokenizer, TokenizerLike

Prompt: TypeAlias = str | Sequence[int] | NDArray[np.integer[Any]] | Sequence[Mapping[str, Any]]
"""Text, token ids, or chat messages (mappings with ``role`` and ``content``)."""

_BOUND = "text, token ids, or chat messages, and not empty"


class PromptEncoder:
    """Turns prompts into token ids and holds them against the limits of the engine."""

    def __init__(
        self, tokenizer: TokenizerLike | None, vocab_size: int, max_model_len: int, kv_tokens: int
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._kv_tokens = kv_tokens
        self._max_tokens = min(max_model_len - 1, kv_tokens)
        chars, self._lost_chars = None, ""
        if isinstance(tokenizer, Tokenizer):
            chars, self._lost_chars = tokenizer.chars_per_token, tokenizer.lost_chars
        self._max_chars = None if chars is None else chars * self._max_tokens
        self._plugged: asyncio.Lock | None = None

    def encode(self, prompt: Prompt) -> Int32Array | LargeText:
        """Token ids, or what is large enough to be encoded off the event loop.

        Raises:
            InvalidRequest: the prompt is of no kind that this model takes, or is empty.
            PromptTooLong: it does not fit.
        """
        if isinstance(prompt, str):
            return self._text(prompt, special=True)
        if isinstance(prompt, np.ndarray):
            return self._ids(prompt)
        if not isinstance(prompt, (list, tuple, range)) or not prompt:
            raise InvalidRequest("prompt", prompt, _BOUND)
        if isinstance(prompt[0], Mapping):  # the first tells: there may be 100,000 token ids
            messages = [item for item in prompt if isinstance(item, Mapping)]
            if len(messages) < len(prompt):
                raise InvalidRequest("prompt", prompt, _BOUND)
            tokenizer = self._needs_tokenizer(prompt)
            if _size(messages) >= LARGE_TEXT_CHARS:  # a copy: the caller may go on with the list
                return LargeText(copy.deepcopy(messages), special=False)
            # The template writes the special tokens.
            return self._text(tokenizer.render_chat(messages), special=False)
        self._check_length(len(prompt))
        return self._ids(prompt)

    async def encode_large(self, large: LargeText) -> Int32Array:
        """The same for a large text or conversation, in a thread. Raises as ``encode`` does."""
        tokenizer = self._needs_tokenizer(large.prompt)

        def work() -> Int32Array:
            prompt = large.prompt
            text = prompt if isinstance(prompt, str) else tokenizer.render_chat(prompt)
            self._check_chars(text)
            return self._ids(encode(text, add_special_tokens=large.special))

        encode: Callable[..., list[int]] = tokenizer.encode
        if isinstance(tokenizer, Tokenizer):
            encode = partial(tokenizer.encode_without_gil, check_length=self._check_length)
            return await tokenizer.off_loop(work)
        if self._plugged is None:
            self._plugged = asyncio.Lock()
        async with self._plugged:  # nobody knows how many threads a plugged tokenizer takes
            return await in_thread(work, "aiosched-tokenizer")

    def _text(self, text: str, *, special: bool) -> Int32Array | LargeText:
        tokenizer = self._needs_tokenizer(text)
        self._check_chars(text)
        if len(text) >= LARGE_TEXT_CHARS:
            return LargeText(text, special)
        return self._ids(tokenizer.encode(text, add_special_tokens=special))

    def _check_chars(self, text: str) -> None:
        """Refuse a text that is empty, or that cannot fit whatever its tokens are."""
        if not text:
            raise InvalidRequest("prompt", text, _BOUND)
        if self._max_chars is not None and len(text) > self._max_chars:
            if len(text) - sum(map(text.count, self._lost_chars)) <= self._max_chars:
                return
            why = f"more never fit {self._max_tokens} tokens"
            bound = f"at most {self._max_chars} characters: {why}"
            raise InvalidRequest("prompt", f"{len(text)} characters", bound)

    def _check_length(self, tokens: int) -> None:
        if tokens >= self._max_model_len:
            limit = self._max_model_len - 1
            raise PromptTooLong(tokens, limit, f"max_model_len is {self._max_model_len}")
        if tokens > self._kv_tokens:
            raise PromptTooLong(tokens, self._kv_tokens, "the KV cache has no room for more")

    def _ids(self, ids: Sequence[int] | NDArray[np.integer[Any]]) -> Int32Array:
        try:
            array = np.asarray(ids)
        except (ValueError, OverflowError):
            raise InvalidRequest("prompt", ids, _BOUND) from None
        if array.ndim != 1 or not len(array) or not np.issubdtype(array.dtype, np.integer):
            raise InvalidRequest("prompt", ids, _BOUND)
        if array.min() < 0 or array.max() >= self._vocab_size:
            wrong = int(array[(array < 0) | (array >= self._vocab_size)][0])
            raise InvalidRequest("prompt", wrong, f"token ids in [0, {self._vocab_size})")
        self._check_length(len(array))
        return array.astype(np.int32)  # a copy: the caller may change its list or array

    def _needs_tokenizer(self, prompt: object) -> TokenizerLike:
        if self._tokenizer is None:
            raise InvalidRequest("prompt", prompt, "token ids: the model has no tokenizer")
        return self._tokenizer


class LargeText:
    """A text, or a conversation to be rendered, that takes long to encode.

    Attributes:
        special: whether special tokens are added to it.
    """

    __slots__ = ("prompt", "special")

    def __init__(self, prompt: str | list[Mapping[str, Any]], special: bool) -> None:
        self.prompt = prompt
        self.special = special


def _size(value: object, depth: int = 4) -> int:
    """About how many characters a conversation has; each part of it costs as much as some 32."""
    if isinstance(value, str):
        return len(value)
    if depth == 0 or not isinstance(value, (Mapping, list, tuple)):
        return 0
    parts = value.values() if isinstance(value, Mapping) else value
    return 32 + sum(_size(part, depth - 1) for part in parts)
