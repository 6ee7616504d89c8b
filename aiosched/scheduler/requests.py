"""Request: one answer being generated, as the scheduler sees it.

A request's committed tokens are its ``output`` list and nothing else: text, log-probabilities,
usage and what is computed again after a retraction all derive from it. What concerns one step
belongs to the step; what concerns the KV row of a running request belongs to the ``RowTable``.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Protocol

import numpy as np

from aiosched.model.inputs import Int32Array, IntArray
from aiosched.params import SamplingParams
from aiosched.request import FinishReason
from aiosched.scheduler.logprobs import LogprobRows
from aiosched.scheduler.reader import Reader

if TYPE_CHECKING:
    from aiosched.cache.radix import Node


class State(IntEnum):
    """Where a request is. QUEUED, PARKED and FINISHED ones hold neither row nor KV pages."""

    QUEUED = 0  # waits for admission, new or retracted
    PREFILL = 1  # its tokens are being read in
    DECODE = 2  # one token a step
    RETIRING = 3  # its last step is launched: it runs no more, and waits for the result
    PAUSED = 4  # its reader is slow: skipped in the batch, keeps its KV
    PARKED = 5  # paused, and retracted since: admitted again once its reader reads
    RESUMING = 6  # its reader reads again: it has its KV and waits for a place in the batch
    FINISHED = 7


class TextPipe(Protocol):
    """Turns tokens into text as they are committed, for a request with stop strings."""

    def push(self, token: int) -> tuple[str, bool]:
        """The text that may be shown now, and whether a stop string is complete."""

    def flush(self) -> str:
        """The text that was held back, once the answer has ended otherwise. The same each time."""


class Family:
    """The ``n`` answers of one prompt: the first reads it in, the others share its KV pages.

    Attributes:
        leader: the first.
        prompt_ready: the prompt's pages were in the prefix cache once.
        set_aside: siblings whose turn came before that. They still count as waiting.
    """

    __slots__ = ("leader", "prompt_ready", "set_aside")

    def __init__(self) -> None:
        self.leader: Request | None = None
        self.prompt_ready = False
        self.set_aside: list[Request] = []


class Request:
    """One answer of a prompt.

    Attributes:
        prompt: token ids, int32.
        output: committed token ids; only ``process_batch_result`` appends.
        read: how many of ``output`` the reader has taken.
        key: place in the waiting queue, smaller first.
        deadline_at: on the event loop's clock.
        row: its row from admission to release, else 0.
        node: the radix node that it holds, while it has a row.
        target: KV length at which its prefill is complete (prompt, and output if retracted).
    """

    __slots__ = (
        "__weakref__",
        "allowed",
        "bad_words",
        "bias_ids",
        "bias_values",
        "cached_tokens",
        "choice",
        "deadline_at",
        "error",
        "family",
        "finish_reason",
        "id",
        "interval",
        "key",
        "logprobs",
        "max_new",
        "node",
        "output",
        "params",
        "priority",
        "prompt",
        "prompt_logprobs",
        "read",
        "reader",
        "retractions",
        "row",
        "seed",
        "state",
        "stop_ids",
        "target",
        "text_pipe",
        "texts",
        "tracked_row",
        "unread_limit",
    )

    def __init__(
        self,
        request_id: str,
        prompt: Int32Array,
        params: SamplingParams,
        *,
        max_new: int,
        seed: int,
        stop_ids: frozenset[int],
        reader: Reader,
        family: Family,
        choice: int = 0,
        priority: int = 0,
        key: tuple[float, int] = (0.0, 0),
        deadline_at: float | None = None,
        unread_limit: int = 2**31,
        text_pipe: TextPipe | None = None,
        bias: tuple[Sequence[int], Sequence[float]] = ((), ()),
        bad_words: tuple[tuple[int, ...], ...] = (),
        allowed: IntArray | None = None,
    ) -> None:
        self.id = request_id
        self.prompt = prompt
        self.params = params
        self.max_new = max_new
        self.seed = seed
        self.stop_ids = stop_ids
        self.reader = reader
        self.family = family
        self.choice = choice
        self.priority = priority
        self.key = key
        self.deadline_at = deadline_at
        self.unread_limit = unread_limit
        self.interval = params.stream_interval
        self.bias_ids = tuple(bias[0])
        self.bias_values = tuple(bias[1])
        self.bad_words = bad_words
        self.allowed = allowed
        self.output: list[int] = []
        self.read = 0
        self.text_pipe = text_pipe
        self.texts: list[str] | None = None if text_pipe is None else []
        self.logprobs = None if params.logprobs is None else LogprobRows(params.logprobs)
        # One reading of the prompt gives them; the other choices share its pages instead.
        self.prompt_logprobs = (
            None
            if params.prompt_logprobs is None or choice
            else LogprobRows(params.prompt_logprobs)
        )
        self.cached_tokens = 0
        self.state = State.QUEUED
        self.row = 0
        self.node: Node | None = None
        self.target = len(prompt)
        self.tracked_row = 0
        self.retractions = 0
        self.finish_reason: FinishReason | None = None
        self.error: Exception | None = None
        if family.leader is None:
            family.leader = self

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def held_by_reader(self) -> bool:
        """Whether it waits for its reader to read on."""
        return self.state is State.PAUSED or self.state is State.PARKED

    @property
    def stopped_by_token(self) -> bool:
        """Whether its last token is one that ends answers, and did."""
        return self.finish_reason is FinishReason.STOP and self.output[-1] in self.stop_ids

    @property
    def tracked(self) -> bool:
        """Whether its sampling looks back at earlier tokens, on the device."""
        return self.params.penalised or bool(self.bad_words)

    @property
    def length(self) -> int:
        """Prompt and committed output, in tokens."""
        return len(self.prompt) + len(self.output)

    def next_look(self) -> int:
        """Length of ``output`` at which commit must look at it again, one token at a time.

        There it ends, or its unread tokens may have come to their limit. Until then neither can be
        the case whatever its reader does, so commit need not look at it at all.
        """
        room = max(1, self.unread_limit - (len(self.output) - self.read))
        return min(self.max_new, len(self.output) + room)

    def tokens(self, length: int | None = None) -> Int32Array:
        """The first ``length`` tokens of prompt and output (all of them if not given)."""
        length = self.length if length is None else length
        if length <= len(self.prompt):
            return self.prompt[:length]
        tail = np.asarray(self.output[: length - len(self.prompt)], dtype=np.int32)
        return np.concatenate([self.prompt, tail])

    def __repr__(self) -> str:
        return f"<Request {self.id!r}/{self.choice} {self.state.name} {self.length} tokens>"
