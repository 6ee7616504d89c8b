"""What a request gives back: tokens, completions, usage, and why it ended."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

import msgspec

from aiosched.errors import DeadlineExceeded, RequestAborted


class FinishReason(StrEnum):
    """Why an answer ended. Compares equal to its string."""

    STOP = "stop"  # an end token, a stop token or a stop string
    LENGTH = "length"  # max_tokens, or the model's length
    DEADLINE = "deadline"  # the request's deadline passed
    ABORT = "abort"  # aborted by its reader, by Engine.abort or by a drain that ran out of time
    ERROR = "error"  # an error of its own, or of the engine; reading the stream raises it


class Logprob(msgspec.Struct, frozen=True, gc=False):
    """A token's log-probability (natural log) under the model, with the likeliest alternatives."""

    token_id: int
    logprob: float
    top: Mapping[int, float]


class Token(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """One step of an answer's stream.

    Attributes:
        id: the token, or ``None`` on a last event that brings none (deadline, abort).
        text: what it adds to the text. May be empty: a character may need several tokens, and text
            that may still become a stop string is held back. Joined, the texts are the whole.
        index: position in the answer, from 0. A last event without a token has the answer's length.
        logprob, top_logprobs: given if ``SamplingParams.logprobs`` asks for them.
        finish_reason: on the last event alone.
        prompt_logprobs: on the first token, one for each prompt token after the first.
        choice: which of the ``n`` answers it belongs to.
    """

    id: int | None
    text: str
    index: int
    logprob: float | None = None
    top_logprobs: Mapping[int, float] | None = None
    finish_reason: FinishReason | None = None
    prompt_logprobs: tuple[Logprob, ...] | None = None
    choice: int = 0


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of a request. ``cached_tokens`` of the prompt were found in the prefix cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """One of the ``n`` answers of a request."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[Logprob, ...] | None = None


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """A whole answer. The plain attributes are those of the first choice."""

    request_id: str
    choices: tuple[Choice, ...]
    usage: Usage
    prompt_logprobs: tuple[Logprob, ...] | None = None

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        return self.choices[0].finish_reason

    @property
    def logprobs(self) -> tuple[Logprob, ...] | None:
        return self.choices[0].logprobs

    def raise_for_finish(self) -> Completion:
        """Return self if every choice ended by stop or length.

        Raises:
            DeadlineExceeded: the deadline cut a choice.
            RequestAborted: a choice was aborted.
        """
        for choice in self.choices:
            if choice.finish_reason is FinishReason.DEADLINE:
                raise DeadlineExceeded(f"request {self.request_id!r} ran out of time")
            if choice.finish_reason is FinishReason.ABORT:
                raise RequestAborted(f"request {self.request_id!r} was aborted")
        return self
