"""Prompts: text, token ids or chat messages, to token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from aiosched.errors import InvalidRequest, PromptTooLong
from aiosched.model.inputs import Int32Array
from aiosched.text.tokenizer import LARGE_TEXT_CHARS, TokenizerLike, encode_prompt

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

    def encode(self, prompt: Prompt) -> Int32Array | LargeText:
        """Token ids, or a text that is large enough to be encoded off the event loop.

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
        messages = [item for item in prompt if isinstance(item, Mapping)]
        if len(messages) == len(prompt):
            tokenizer = self._needs_tokenizer(prompt)
            # The template writes the special tokens.
            return self._text(tokenizer.render_chat(messages), special=False)
        return self._ids(prompt)

    async def encode_large(self, text: LargeText) -> Int32Array:
        """The same for a large text. Raises as ``encode`` does."""
        tokenizer = self._needs_tokenizer(text.text)
        return self._ids(await encode_prompt(tokenizer, text.text, add_special_tokens=text.special))

    def _text(self, text: str, *, special: bool) -> Int32Array | LargeText:
        if not text:
            raise InvalidRequest("prompt", text, _BOUND)
        tokenizer = self._needs_tokenizer(text)
        if len(text) >= LARGE_TEXT_CHARS:
            return LargeText(text, special)
        return self._ids(tokenizer.encode(text, add_special_tokens=special))

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
        if len(array) >= self._max_model_len:
            limit = self._max_model_len - 1
            raise PromptTooLong(len(array), limit, f"max_model_len is {self._max_model_len}")
        if len(array) > self._kv_tokens:
            raise PromptTooLong(len(array), self._kv_tokens, "the KV cache has no room for more")
        return array.astype(np.int32)  # a copy: the caller may change its list or array

    def _needs_tokenizer(self, prompt: object) -> TokenizerLike:
        if self._tokenizer is None:
            raise InvalidRequest("prompt", prompt, "token ids: the model has no tokenizer")
        return self._tokenizer


class LargeText:
    """A text that takes long to encode, and whether special tokens are added to it."""

    __slots__ = ("special", "text")

    def __init__(self, text: str, special: bool) -> None:
        self.text = text
        self.special = special
