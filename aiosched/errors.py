"""Every error that a user of aiosched can meet, in one tree:

AioschedError
├── InvalidRequest (ValueError)       a parameter or prompt that cannot be served
│   └── PromptTooLong                 the prompt does not fit, with both numbers
├── InvalidConfig (ValueError)        a setting of the engine that cannot be used
├── ModelLoadError                    the model could not be found, fetched or read
├── QueueFull                         overload: try again later
├── RequestFailed                     one request failed; its neighbours go on
│   ├── KVCacheExhausted              it needs more KV memory than the engine has
│   └── InvalidModelOutput            NaN logits, or a token outside the vocabulary
├── RequestAborted                    raised by Completion.raise_for_finish()
├── DeadlineExceeded                  raised by Completion.raise_for_finish()
├── EngineClosed                      closed, draining, or not opened yet
├── EngineFailed                      the engine is dead; the first cause is chained
│   └── DeviceStalled                 a step never answered; names step, fence and rank
└── WrongEventLoop (RuntimeError)     the engine belongs to another event loop
"""

from __future__ import annotations

from typing import TypeVar


class AioschedError(Exception):
    """The root: ``except AioschedError`` catches whatever aiosched raises on purpose."""


class InvalidRequest(AioschedError, ValueError):
    """A parameter or a prompt that cannot be served.

    Attributes:
        field: name of the parameter.
        value: what was given.
        bound: what is allowed, in words.
    """

    def __init__(self, field: str, value: object, bound: str) -> None:
        shown = repr(value)
        if len(shown) > 200:
            shown = f"{shown[:200]}… ({len(shown)} characters)"
        super().__init__(f"{field}={shown}: must be {bound}")
        self.field = field
        self.value = value
        self.bound = bound


class PromptTooLong(InvalidRequest):
    """The prompt has more tokens than can be held.

    Attributes:
        tokens: length of the prompt in tokens.
        limit: the longest prompt that would have been taken.
    """

    def __init__(self, tokens: int, limit: int, why: str) -> None:
        super().__init__("prompt", f"{tokens} tokens", f"at most {limit} tokens: {why}")
        self.tokens = tokens
        self.limit = limit


class InvalidConfig(AioschedError, ValueError):
    """A setting of the engine that cannot be used; names the field, the value and the bound."""

    def __init__(self, field: str, value: object, bound: str) -> None:
        super().__init__(f"{field}={value!r}: must be {bound}")
        self.field = field
        self.value = value
        self.bound = bound


class ModelLoadError(AioschedError):
    """The model could not be found, fetched, verified or read."""


class QueueFull(AioschedError):
    """The waiting queue is full: the engine is overloaded, try again later.

    Attributes:
        waiting: how many requests wait.
        limit: the engine's ``max_queued_requests``.
    """

    def __init__(self, waiting: int, limit: int) -> None:
        super().__init__(f"{waiting} requests wait already (max_queued_requests={limit})")
        self.waiting = waiting
        self.limit = limit


class RequestFailed(AioschedError):
    """This request failed. The engine and every other request go on."""


class KVCacheExhausted(RequestFailed):
    """Alone in the engine, the request still needs more KV pages than there are."""

    def __init__(self, request_id: str, tokens: int, capacity: int) -> None:
        super().__init__(
            f"request {request_id!r} holds {tokens} tokens and needs room for one more; "
            f"the KV cache has room for {capacity} (kv_tokens)"
        )
        self.tokens = tokens
        self.capacity = capacity


class InvalidModelOutput(RequestFailed):
    """The model gave NaN logits, or a token outside its vocabulary, for this request."""

    def __init__(self, request_id: str, step: int, position: int, token: int) -> None:
        what = "logits that are not numbers" if token < 0 else f"token {token}"
        super().__init__(
            f"request {request_id!r}: the model gave {what} in step {step} at position {position}"
        )
        self.step = step
        self.position = position


class RequestAborted(AioschedError):
    """The request was aborted before it was complete."""


class DeadlineExceeded(AioschedError):
    """The request's deadline passed before it was complete."""


class EngineClosed(AioschedError):
    """The engine takes no requests: it was not opened, drains, or was closed."""


class EngineFailed(AioschedError):
    """The engine is dead. ``__cause__`` is the first error that stopped it."""


class DeviceStalled(EngineFailed):
    """A step was launched and its result never came."""

    def __init__(self, step: int, fence: str, rank: int, waited: float) -> None:
        super().__init__(
            f"step {step} did not answer: rank {rank} waited {waited:.1f} s for its {fence!r} fence"
        )
        self.step = step
        self.fence = fence
        self.rank = rank


class WrongEventLoop(AioschedError, RuntimeError):
    """An engine is bound to the event loop that opened it, and was used from another one."""


Error = TypeVar("Error", bound=AioschedError)


def twin(error: Error) -> Error:
    """The same error as another object: raising one object to many readers mixes tracebacks."""
    other = error.__class__.__new__(error.__class__)
    other.args = error.args
    other.__dict__.update(error.__dict__)
    other.__cause__ = error.__cause__
    return other
