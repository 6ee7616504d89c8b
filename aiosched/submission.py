"""From a prompt and SamplingParams to the requests that the scheduler runs."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from aiosched.answer import Answer
from aiosched.errors import InvalidRequest
from aiosched.model.draws import derive_seed
from aiosched.model.inputs import Int32Array
from aiosched.params import MAX_BAD_WORD_TOKENS, SamplingParams
from aiosched.scheduler.requests import Family, Request
from aiosched.text.pipe import StopTextPipe
from aiosched.text.tokenizer import TokenizerLike


class Banned(NamedTuple):
    """The bad words of a request: those of one token, and those of several, sorted."""

    single: frozenset[int]
    words: tuple[tuple[int, ...], ...]


class RequestFactory:
    """Checks parameters against the model and makes the ``n`` requests of an answer."""

    def __init__(
        self,
        *,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        tokenizer: TokenizerLike | None,
        max_model_len: int,
        max_unread_tokens: int,
        priority_aging: float,
        priorities: bool,
    ) -> None:
        self._vocab_size = vocab_size
        self._eos = frozenset(eos_token_ids)
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._max_unread = max_unread_tokens
        self._aging = priority_aging
        self._priorities = priorities
        self._serial = itertools.count()
        self._random = random.SystemRandom()

    def check(self, params: SamplingParams, priority: int, deadline: float | None) -> Banned:
        """What depends on the model or the engine; the rest was checked by ``SamplingParams``.

        Returns the bad words as tokens, for ``make``: they are spelled once.

        Raises:
            InvalidRequest: names the field, the value and the bound.
        """
        if isinstance(priority, bool) or not isinstance(priority, int) or abs(priority) > 10**6:
            raise InvalidRequest("priority", priority, "an integer in [-1000000, 1000000]")
        if priority and not self._priorities:
            raise InvalidRequest("priority", priority, "0: the engine's policy is fifo")
        if deadline is not None and (
            isinstance(deadline, bool)
            or not isinstance(deadline, (int, float))
            or not 0 <= deadline < 1e9
        ):
            raise InvalidRequest("deadline", deadline, "seconds from now in [0, 1e9), or None")
        for field in ("logit_bias", "stop_token_ids", "allowed_token_ids"):
            self._in_vocabulary(field, getattr(params, field) or ())
        if self._tokenizer is None:
            if params.stop_strings:
                raise InvalidRequest("stop", params.stop, "empty: the model has no tokenizer")
            if any(isinstance(word, str) for word in params.bad_words):
                raise InvalidRequest(
                    "bad_words", params.bad_words, "token ids: the model has no tokenizer"
                )
        banned = self._banned(params)
        self._check_choice_left(params, banned)
        return banned

    def make(
        self,
        answer: Answer,
        prompt: Int32Array,
        params: SamplingParams,
        banned: Banned,
        *,
        priority: int,
        now: float,
        deadline_at: float | None,
    ) -> tuple[Request, ...]:
        """The requests of ``answer``, one for each choice.

        ``banned`` is what ``check`` returned for ``params``; ``now`` is the time of arrival.
        """
        family = Family()
        room = self._max_model_len - len(prompt)
        max_new = room if params.max_tokens is None else min(params.max_tokens, room)
        seed = self._random.getrandbits(63) if params.seed is None else params.seed
        ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos)
        bias = dict.fromkeys(banned.single, float("-inf"))
        for token, value in (params.logit_bias or {}).items():
            bias[token] = bias.get(token, 0.0) + value
        allowed = None
        if params.allowed_token_ids is not None:
            allowed = np.array(sorted({*params.allowed_token_ids}), dtype=np.int64)
        return tuple(
            Request(
                answer.id,
                prompt,
                params,
                max_new=max_new,
                seed=derive_seed(seed, choice),
                stop_ids=ends,
                reader=answer.reader,
                family=family,
                choice=choice,
                priority=priority,
                key=(now - priority * self._aging, next(self._serial)),
                deadline_at=deadline_at,
                unread_limit=2**62 if answer.unbounded else self._max_unread,
                text_pipe=self._pipe(params),
                bias=(tuple(bias), tuple(bias.values())),
                bad_words=banned.words,
                allowed=allowed,
            )
            for choice in range(params.n)
        )

    def _check_choice_left(self, params: SamplingParams, banned: Banned) -> None:
        """Wherever an answer stands, some token must be left to choose."""
        single, words = banned
        allowed, field = params.allowed_token_ids, "allowed_token_ids"
        if allowed is None:
            ends = len(params.stop_token_ids) + len(self._eos)
            if len(single) + len(words) + ends < self._vocab_size:
                return  # as good as always, and a vocabulary is large
            allowed, field = range(self._vocab_size), "stop_token_ids"
        left = set(allowed) - single
        if _dead_end(left, words):
            if params.allowed_token_ids is None:
                raise InvalidRequest("bad_words", params.bad_words, "words that leave a token")
            raise InvalidRequest(field, allowed, "not all banned by bad_words")
        if params.min_tokens and _dead_end(left - self._eos - {*params.stop_token_ids}, words):
            without = f"{field} and bad_words leave" if params.bad_words else f"{field} leaves"
            raise InvalidRequest(
                "min_tokens", params.min_tokens, f"0: {without} nothing but end tokens"
            )

    def _pipe(self, params: SamplingParams) -> StopTextPipe | None:
        if not params.stop_strings or self._tokenizer is None:
            return None
        return StopTextPipe(self._tokenizer, params)

    def _banned(self, params: SamplingParams) -> Banned:
        words: set[tuple[int, ...]] = set()
        for word in params.bad_words:
            if isinstance(word, str):
                words.update(self._spellings(word))
            else:
                self._in_vocabulary("bad_words", word)
                words.add(tuple(word))
        single = frozenset(word[0] for word in words if len(word) == 1)
        return Banned(single, tuple(sorted(word for word in words if len(word) > 1)))

    def _spellings(self, word: str) -> Iterable[tuple[int, ...]]:
        """A word at the start of a text and within one, where its tokens usually differ."""
        assert self._tokenizer is not None
        for spelling in (word, " " + word.lstrip()):
            ids = tuple(self._tokenizer.encode(spelling, add_special_tokens=False))
            if not 1 <= len(ids) <= MAX_BAD_WORD_TOKENS:
                bound = f"words of at most {MAX_BAD_WORD_TOKENS} tokens"
                raise InvalidRequest("bad_words", word, bound)
            yield ids

    def _in_vocabulary(self, field: str, ids: Iterable[int]) -> None:
        for token in ids:
            if token >= self._vocab_size:
                raise InvalidRequest(field, token, f"token ids in [0, {self._vocab_size})")


def _dead_end(left: set[int], words: Sequence[tuple[int, ...]]) -> bool:
    """Whether bad words can come to ban all of ``left`` at once.

    After an answer that ends like the beginning of a word, the last token of that word is banned,
    and that of each word whose beginning the answer ends like, too.
    """
    if not left:
        return True
    last_tokens: dict[tuple[int, ...], set[int]] = {}  # beginning of a word → what is banned then
    for word in words:
        last_tokens.setdefault(word[:-1], set()).add(word[-1])
    if not left.issubset(word[-1] for word in words):
        return False

    def bans_all(answer: tuple[int, ...]) -> bool:
        ends = [answer[start:] for start in range(len(answer))]
        banned = [last_tokens[end] for end in ends if end in last_tokens]
        return sum(map(len, banned)) >= len(left) and left <= set().union(*banned)

    whole = set(words)

    def holds_a_word(answer: tuple[int, ...]) -> bool:
        size = len(answer) + 1
        return any(answer[i:j] in whole for i in range(size) for j in range(i + 2, size))

    return any(
        left.issuperset(answer) and bans_all(answer) and not holds_a_word(answer)
        for answer in last_tokens
    )
