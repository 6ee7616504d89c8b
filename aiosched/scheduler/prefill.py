"""PrefillPlanner: admission, and the chunks of prompts that the next step reads in."""

from __future__ import annotations

from typing import NamedTuple

from aiosched.scheduler.memory import Admission
from aiosched.scheduler.requests import Request
from aiosched.scheduler.state import SchedulerState

MAX_ADMISSIONS = 128
"""Requests admitted in one turn. Each costs some 20 to 40 µs on the event loop, and a burst of
thousands of short prompts would hold up everybody else on it."""


class Chunk(NamedTuple):
    """Tokens ``start`` to ``end`` of a request, read in by one step."""

    request: Request
    start: int
    end: int

    @property
    def is_last(self) -> bool:
        """Whether the step samples a token for it."""
        return self.end == self.request.target


class PrefillPlanner:
    """Continues the prompts that are being read in, then admits waiting requests."""

    def __init__(self, state: SchedulerState, max_running: int) -> None:
        self._state = state
        self._max_running = max_running

    def plan(self, budget: int) -> list[Chunk]:
        """Chunks of at most ``budget`` tokens in all, oldest prompt first."""
        state = self._state
        chunks: list[Chunk] = []
        for request in state.prefilling:
            if budget <= 0:
                return chunks
            chunks.append(self._chunk(request, budget))
            budget -= chunks[-1].end - chunks[-1].start
        if budget <= 0 or not state.waiting:
            return chunks
        growth = state.running_growth()
        for _ in range(MAX_ADMISSIONS):
            if budget <= 0 or (admitted := self._admit(growth)) is None:
                break
            chunks.append(self._chunk(admitted, budget))
            budget -= chunks[-1].end - chunks[-1].start
        return chunks

    def _chunk(self, request: Request, budget: int) -> Chunk:
        start = int(self._state.table.kv_len[request.row])
        return Chunk(request, start, min(request.target, start + budget))

    def _admit(self, growth: int) -> Request | None:
        """Admit the first of the queue, if it has a place; nobody overtakes it for being small."""
        state = self._state
        while state.active + len(state.resuming) < self._max_running:
            request = state.waiting.pop()
            if request is None:
                break
            if self._waits_for_family(request):
                state.waiting.set_aside(request)
                request.family.set_aside.append(request)
            elif self._never_fits(request):
                state.waiting.push(request)  # its end takes it out
                state.exhaust(request)
            else:
                if self._place(request, growth):
                    state.begin_prefill(request)
                    return request
                state.waiting.push(request)
                return None
        return None

    def _waits_for_family(self, request: Request) -> bool:
        """Whether its prompt is just being read in by the first of its family.

        Once that is done, its pages are in the prefix cache and the others share them.
        """
        leader = request.family.leader
        return (
            self._state.memory.radix is not None
            and leader is not None
            and leader is not request
            and not request.family.prompt_ready
            and not leader.finished
        )

    def _never_fits(self, request: Request) -> bool:
        memory = self._state.memory
        return memory.pages_for(request.length) > memory.pool.total

    def _place(self, request: Request, growth: int) -> bool:
        """Find it a row and pages, if need be those of paused requests."""
        state = self._state
        while True:
            if state.table.free:
                outcome = state.memory.admit(request, state.headroom(growth))
                if outcome is not Admission.SHORT:
                    return outcome is Admission.DONE
            elif state.table.arriving:
                return False
            if not state.paused:
                return False
            state.retract(state.victims()[0])
