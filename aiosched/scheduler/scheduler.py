"""Scheduler: intake and plan. Pure: neither waits, launches or reads a result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from aiosched.request import FinishReason
from aiosched.scheduler.batch import ScheduleBatch
from aiosched.scheduler.build import build_batch
from aiosched.scheduler.decode import DecodePlanner
from aiosched.scheduler.inbox import Inbox
from aiosched.scheduler.memory import KVMemory
from aiosched.scheduler.prefill import PrefillPlanner
from aiosched.scheduler.rows import RowTable
from aiosched.scheduler.state import SchedulerState


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds a batch and the memory behind it; all resolved, none ``None``."""

    num_pages: int
    page_size: int
    max_model_len: int
    max_running: int
    chunk_tokens: int
    batch_tokens: int
    depth: int
    prefix_cache: bool = True
    check: bool = False

    @property
    def rows(self) -> int:
        """Rows for everybody who runs, and for those whose results are still pending.

        A request that retires takes no place in a batch, but keeps its row until its last result
        is in: ``depth + 1`` generations of batches may be there at once. Paused ones need some too.
        """
        return self.max_running * (self.depth + 2)


class Scheduler:
    """Decides what the next step computes: ``intake()``, then ``plan()``."""

    def __init__(self, limits: Limits, inbox: Inbox, eos_token_ids: Sequence[int]) -> None:
        pages_per_row = -(-limits.max_model_len // limits.page_size)
        table = RowTable(limits.rows, min(pages_per_row, limits.num_pages) + 1)
        memory = KVMemory(
            limits.num_pages,
            limits.page_size,
            table,
            prefix_cache=limits.prefix_cache,
            check=limits.check,
        )
        self.limits = limits
        self.inbox = inbox
        self.state = SchedulerState(table, memory)
        self.eos_token_ids = tuple(eos_token_ids)
        self._decodes = DecodePlanner(self.state)
        self._prefills = PrefillPlanner(self.state, limits.max_running)

    def intake(self, now: float) -> None:
        """Take in what arrived since the last turn, and let go of what was aborted or is late."""
        inbox, state = self.inbox, self.state
        while inbox.arrivals:
            state.push(inbox.arrivals.popleft())
        while inbox.aborts:
            state.finish(inbox.aborts.popleft(), FinishReason.ABORT)
        while inbox.resumes:
            state.resume(inbox.resumes.popleft())
        for request in state.expired(now):
            state.finish(request, FinishReason.DEADLINE)

    def plan(self) -> ScheduleBatch | None:
        """The next step, or ``None`` if there is nothing that could run now.

        Needs no result of a step in flight: lengths are known ahead, and a request that turns out
        to have ended by a stop rule has merely run a row too many, whose result is dropped.
        """
        self.state.fill_places(self.limits.max_running)
        decodes = self._decodes.plan(self.limits.batch_tokens)
        left = self.limits.batch_tokens - len(decodes)
        chunks = self._prefills.plan(min(self.limits.chunk_tokens, left))
        if not len(decodes) and not chunks:
            return None
        batch = build_batch(self.state, decodes, chunks, self.eos_token_ids)
        self.state.decay()
        return batch
