"""A crowd of streams on the simulated device, all decoding at once, and what it leaves behind."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from itertools import pairwise
from time import thread_time
from typing import Any

import msgspec
import numpy as np

from aiosched.answer import Answer
from aiosched.bench.canned_sim import CannedSimDevice
from aiosched.bench.null_device import CannedResults, NullModel
from aiosched.bench.parts import Parts
from aiosched.bench.readers import ending
from aiosched.engine import Engine
from aiosched.model.inputs import StepInputs
from aiosched.params import SamplingParams
from aiosched.scheduler.prefill import MAX_ADMISSIONS
from aiosched.scheduler.requests import Request
from aiosched.stream import TokenStream

VOCAB = 1024
PROMPT_TOKENS = 16
WINDOWS = 3


class Left(msgspec.Struct, frozen=True):
    """What is still there when everybody has gone.

    Attributes:
        pages: that are neither free nor kept in the prefix cache for others.
        tasks: beyond those that were there before.
        objects: requests, answers and streams.
        size: bytes that Python's allocator still has out once the engine is closed; ``None`` if
            they were not counted.
    """

    pages: int
    rows: int
    tasks: int
    objects: int
    size: int | None

    @classmethod
    def worst(cls, one: Left, other: Left) -> Left:
        sizes = [left.size for left in (one, other) if left.size is not None]
        return cls(
            max(one.pages, other.pages),
            max(one.rows, other.rows),
            max(one.tasks, other.tasks),
            max(one.objects, other.objects),
            max(sizes, default=None),
        )

    def as_columns(self) -> dict[str, Any]:
        return {
            "left_pages": self.pages,
            "left_rows": self.rows,
            "left_tasks": self.tasks,
            "left_objects": self.objects,
            "left_kb": None if self.size is None else self.size / 1024,
        }


class Crowd:
    """``streams`` streams on one engine, each with a task that reads it.

    Args:
        steps: of one measurement, once all decode; there are ``WINDOWS``.
        weigh: measure memory instead of time.

    Attributes:
        submit_seconds: of all calls of ``generate``. All times are CPU time of the loop's thread.
        admit_seconds: of all intakes and plans until all decoded.
        step_seconds: of a step, for each measurement.
        engine_bytes: that an engine takes when it is opened.
        stream_bytes: that all streams, tasks and requests take while they run.
    """

    def __init__(self, streams: int, *, depth: int, steps: int, weigh: bool = False) -> None:
        self.streams = streams
        self.submit_seconds = 0.0
        self.admit_seconds = 0.0
        self.step_seconds: list[float] = []
        self.engine_bytes = 0
        self.stream_bytes = 0
        self._depth = depth
        self._steps = steps
        self._weigh = weigh
        self._parts = Parts()
        self._marks: list[float] = []
        self._full_steps = 0
        self._measured = False
        self._bytes_before = 0  # there were streams

    async def run(self) -> Left:
        """Open an engine, run them all, and see what is left."""
        if self._weigh:
            tracemalloc.start()
        try:
            before = self._bytes()
            left = await self._with_engine(before)
            size = max(0, self._bytes() - before) if self._weigh else None
        finally:
            if self._weigh:
                tracemalloc.stop()
        return msgspec.structs.replace(left, size=size)

    async def _with_engine(self, before: int) -> Left:
        tasks = len(asyncio.all_tasks())
        gc.collect()
        objects = _count(Request, Answer, TokenStream)  # whoever calls may have some
        device = CannedSimDevice(CannedResults.drawn(VOCAB), on_step=self._on_step)
        async with Engine(NullModel(VOCAB), device=device, **self._settings()) as engine:
            self._parts.attach(engine)
            self._bytes_before = self._bytes()
            self.engine_bytes = self._bytes_before - before
            await self._run_all(engine)
            while engine.stats().running:  # noqa: ASYNC110  (the step in flight)
                await asyncio.sleep(0)
            gc.collect()
            stats, runtime = engine.stats(), engine._runtime
            assert runtime is not None
            table = runtime._state.table
            return Left(
                pages=stats.kv_pages_total - stats.kv_pages_free - stats.kv_pages_cached,
                rows=table.count - table.free,
                tasks=len(asyncio.all_tasks()) - tasks - 1,  # the engine's own
                objects=_count(Request, Answer, TokenStream) - objects,
                size=None,
            )

    async def _run_all(self, engine: Engine) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=self._max_tokens)
        draw = np.random.default_rng(0)
        prompts = draw.integers(0, VOCAB, (self.streams, PROMPT_TOKENS)).tolist()
        self._parts.next_window()
        began = thread_time()
        streams = [engine.generate(prompt, params) for prompt in prompts]
        self.submit_seconds = thread_time() - began
        loop = asyncio.get_running_loop()
        readers = [
            loop.create_task(self._read(stream, to_the_end=index % 2 == 0))
            for index, stream in enumerate(streams)
        ]
        streams.clear()
        del prompts
        async with ending(readers):
            await asyncio.gather(*readers)

    async def _read(self, stream: TokenStream, to_the_end: bool) -> None:
        async for _ in stream:
            if self._measured and not to_the_end:
                break

    def _on_step(self, inputs: StepInputs) -> None:
        if inputs.num_decodes != self.streams or self._measured:
            return
        if not self._marks:
            self._parts.next_window()
            self.admit_seconds = sum(self._parts.windows[0][part] for part in ("intake", "plan"))
        if self._full_steps % self._steps == 0:
            self._marks.append(thread_time())
        self._full_steps += 1
        if len(self._marks) > WINDOWS:
            self.step_seconds = [(b - a) / self._steps for a, b in pairwise(self._marks)]
            self.stream_bytes = self._bytes() - self._bytes_before
            self._measured = True

    @property
    def _max_tokens(self) -> int:
        """Enough for all steps: the first decode while the last are admitted."""
        return self._steps * (WINDOWS + 1) + -(-self.streams // MAX_ADMISSIONS) + 16

    def _settings(self) -> dict[str, Any]:
        return {
            "overlap_depth": self._depth,
            "kv_tokens": self.streams * (PROMPT_TOKENS + self._max_tokens + 32),
            "max_model_len": 2048,
            "prefill_chunk_tokens": MAX_ADMISSIONS * PROMPT_TOKENS,
            "max_running_requests": self.streams,
            "max_queued_requests": self.streams,
        }

    def _bytes(self) -> int:
        """What Python's allocator has out, garbage not counted; 0 unless memory is measured."""
        if not self._weigh:
            return 0
        gc.collect()
        return tracemalloc.get_traced_memory()[0]


def _count(*kinds: type) -> int:
    return sum(type(item) in kinds for item in gc.get_objects())
