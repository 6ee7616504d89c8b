"""SamplingParams: how one request is sampled and when it ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from aiosched.errors import InvalidRequest

MAX_LOGPROBS = 20
MAX_CHOICES = 128
MAX_STOP_STRINGS = 64
MAX_BAD_WORDS = 1_024
MAX_BAD_WORD_CHARS = 256
MAX_BAD_WORD_TOKENS = 16
MAX_SEED = 2**63 - 1


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sampling, penalties, stop rules and output of one request.

    Every field is checked when the object is made; ``InvalidRequest`` names the field, the value
    and the bound. Token ids are checked against the vocabulary when the request is submitted.

    Attributes:
        temperature: 0 chooses the most likely token; above, logits are divided by it.
        top_p: keep the smallest set of tokens whose probability reaches this, in (0, 1].
        top_k: keep this many most likely tokens; 0 or -1 keeps all.
        min_p: keep tokens at least this fraction as likely as the likeliest, in [0, 1].
        repetition_penalty: divides (positive) or multiplies (negative) the logits of tokens that
            stand in the prompt or the answer; 1 is off, in [0.01, 100] (CTRL, arXiv 1909.05858).
        presence_penalty, frequency_penalty: subtracted once, or per occurrence, from tokens that
            stand in the answer, in [-2, 2].
        logit_bias: token id → value added to its logit, in [-100, 100].
        seed: makes the draws a function of (seed, position); ``None`` takes a random seed.
        stop: strings that end the answer; at most 64.
        stop_token_ids: token ids that end the answer, beside the model's own end tokens.
        include_stop: keep the stop string, or the text of the stop token, in the text.
        min_tokens: no end token and no stop string before this many tokens.
        max_tokens: most tokens to generate; ``None``: as many as the model's length allows.
        ignore_eos: go on past the model's end tokens (``stop_token_ids`` still end).
        logprobs: give each token's log-probability and this many alternatives; at most 20.
        prompt_logprobs: the same for each prompt token after the first.
        n: number of answers, which share the prompt's KV pages.
        allowed_token_ids: only these may be generated.
        bad_words: words that may not be generated, at most 1,024: text of at most 256 characters,
            or token ids; at most 16 tokens each.
        stream_interval: wake the reader every this many tokens (the first comes at once).
        skip_special_tokens: leave special tokens out of the text.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop: bool = False
    min_tokens: int = 0
    max_tokens: int | None = 256
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int = 1
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str | Sequence[int]] = ()
    stream_interval: int = 1
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        self._number("temperature", 0.0, 100.0)
        self._number("top_p", 0.0, 1.0, open_low=True)
        self._integer("top_k", -1, 2**31 - 1)
        self._number("min_p", 0.0, 1.0)
        self._number("repetition_penalty", 0.01, 100.0)
        self._number("presence_penalty", -2.0, 2.0)
        self._number("frequency_penalty", -2.0, 2.0)
        self._integer("seed", 0, MAX_SEED, optional=True)
        self._integer("min_tokens", 0, 2**31 - 1)
        self._integer("max_tokens", 1, 2**31 - 1, optional=True)
        self._integer("logprobs", 0, MAX_LOGPROBS, optional=True)
        self._integer("prompt_logprobs", 0, MAX_LOGPROBS, optional=True)
        self._integer("n", 1, MAX_CHOICES)
        self._integer("stream_interval", 1, 2**31 - 1)
        for field in ("include_stop", "ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, field), bool):
                raise InvalidRequest(field, getattr(self, field), "a bool")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                "min_tokens", self.min_tokens, f"at most max_tokens={self.max_tokens}"
            )
        self._check_stop()
        self._check_ids("stop_token_ids", self.stop_token_ids)
        if self.allowed_token_ids is not None:
            self._check_ids("allowed_token_ids", self.allowed_token_ids)
            if not self.allowed_token_ids:
                raise InvalidRequest(
                    "allowed_token_ids", self.allowed_token_ids, "None or not empty"
                )
        self._check_bias()
        self._check_bad_words()

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """``stop`` as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0.0

    @property
    def penalised(self) -> bool:
        """Whether a penalty looks back at earlier tokens."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )

    def _number(self, field: str, low: float, high: float, *, open_low: bool = False) -> None:
        value = getattr(self, field)
        bound = f"a number in {'(' if open_low else '['}{low:g}, {high:g}]"
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise InvalidRequest(field, value, bound)
        if not low <= value <= high or (open_low and value == low):
            raise InvalidRequest(field, value, bound)

    def _integer(self, field: str, low: int, high: int, *, optional: bool = False) -> None:
        value = getattr(self, field)
        if optional and value is None:
            return
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise InvalidRequest(
                field, value, f"an integer in [{low}, {high}]{' or None' if optional else ''}"
            )

    def _check_stop(self) -> None:
        bound = f"a string that is not empty, or at most {MAX_STOP_STRINGS} of them"
        if not isinstance(self.stop, (str, list, tuple)):
            raise InvalidRequest("stop", self.stop, bound)
        if self.stop == "":
            raise InvalidRequest("stop", self.stop, bound)
        strings = self.stop_strings
        if len(strings) > MAX_STOP_STRINGS or not all(isinstance(s, str) and s for s in strings):
            raise InvalidRequest("stop", self.stop, bound)

    def _check_ids(self, field: str, ids: Sequence[int]) -> None:
        bound = "a list of token ids (integers from 0)"
        if not isinstance(ids, (list, tuple, set, frozenset, range)):
            raise InvalidRequest(field, ids, bound)
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int) or token < 0:
                raise InvalidRequest(field, token, bound)

    def _check_bias(self) -> None:
        if self.logit_bias is None:
            return
        if not isinstance(self.logit_bias, Mapping):
            raise InvalidRequest("logit_bias", self.logit_bias, "a mapping of token id to number")
        for token, value in self.logit_bias.items():
            if isinstance(token, bool) or not isinstance(token, int) or token < 0:
                raise InvalidRequest("logit_bias", token, "keyed by token ids (integers from 0)")
            if (
                isinstance(value, bool)
                or not isinstance(value, (int, float))
                or not abs(value) <= 100
            ):
                raise InvalidRequest("logit_bias", value, "numbers in [-100, 100]")

    def _check_bad_words(self) -> None:
        bound = (
            f"a list of words: text of 1 to {MAX_BAD_WORD_CHARS} characters, "
            f"or a list of 1 to {MAX_BAD_WORD_TOKENS} token ids"
        )
        if isinstance(self.bad_words, str) or not isinstance(self.bad_words, (list, tuple)):
            raise InvalidRequest("bad_words", self.bad_words, bound)
        if len(self.bad_words) > MAX_BAD_WORDS:
            most = f"at most {MAX_BAD_WORDS} words"
            raise InvalidRequest("bad_words", f"{len(self.bad_words)} words", most)
        for word in self.bad_words:
            if isinstance(word, str):
                if not 1 <= len(word) <= MAX_BAD_WORD_CHARS:
                    raise InvalidRequest("bad_words", word, bound)
            elif isinstance(word, (list, tuple)) and 1 <= len(word) <= MAX_BAD_WORD_TOKENS:
                self._check_ids("bad_words", word)
            else:
                raise InvalidRequest("bad_words", word, bound)
