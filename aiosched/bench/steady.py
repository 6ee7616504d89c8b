"""Steady decoding on a device of zero cost: the CPU time that the event loop spends on a step."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Mapping
from itertools import pairwise
from time import thread_time
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np

from aiosched.bench.null_device import CannedResults, NullDevice, NullModel
from aiosched.bench.parts import Parts
from aiosched.bench.readers import ending
from aiosched.engine import Engine
from aiosched.model.inputs import StepInputs
from aiosched.params import SamplingParams
from aiosched.stream import TokenStream
from aiosched.text.tokenizer import Tokenizer, TokenizerLike

PROMPT_TOKENS = 32
PAGE_SIZE = 16
DEADLINE = 3600.0  # seconds; none comes, all are kept track of
STOP_STRING = "\N{SYMBOL FOR RECORD SEPARATOR}"
"""No token of the table makes it: what it costs is the looking for it."""


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine is given to do.

    Attributes:
        batch: streams that decode side by side.
        window: steps of one measurement; a multiple of the page size sees as many new pages as
            any other window does.
        windows: measurements, one after another.
    """

    batch: int
    depth: int = 1
    features: str = "all"
    window: int = 320
    windows: int = 5


FEATURES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "plain": {},
        "all": {"stops": True},
        "sampled": {"stops": True, "temperature": 0.8, "top_p": 0.95},
        "stop-strings": {"stops": True, "stop": (STOP_STRING,)},
    }
)
"""Cancellation and backpressure are always on. ``plain``: greedy, ends by length alone, no prefix
cache. ``all``: the model's end tokens, a stop token and a deadline for each request, prefix cache.
``sampled``: and drawn with a seed. ``stop-strings``: and a stop string: text is made at commit."""


class Vocabulary(msgspec.Struct, frozen=True):
    """The ids that there are, and those among them that never come: end tokens and the like."""

    size: int
    special_ids: tuple[int, ...] = ()

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Vocabulary:
        return cls(tokenizer.vocab_size, tuple(sorted(tokenizer.special_ids)))


class Steady:
    """One run: ``load.batch`` streams that decode, measured once all of them do.

    Args:
        tokenizer: for the text of the streams; ``None``: tokens carry ids alone.
        read: whether each stream has a task that reads it; otherwise tokens pile up in it.
        parts: times the steps' parts meanwhile, which costs time itself.
    """

    def __init__(
        self,
        load: Load,
        vocabulary: Vocabulary,
        tokenizer: TokenizerLike | None = None,
        *,
        read: bool = True,
        parts: Parts | None = None,
    ) -> None:
        self.load = load
        self._tokenizer = tokenizer
        self._read = read
        self._parts = parts
        size, ends = vocabulary.size, vocabulary.special_ids
        self._stop_id = next(id for id in range(size) if id not in ends)
        results = CannedResults.drawn(size, (*ends, self._stop_id))
        self._device = NullDevice(results, self._on_step)
        self._model = NullModel(size, eos_token_ids=ends[:1], tokenizer=tokenizer)
        self._full_steps = 0  # steps in which all streams decoded and nothing else ran
        self._marks: list[float] = []
        self._measured: asyncio.Future[None] | None = None

    async def run(self) -> list[float]:
        """Seconds of CPU time a step, of the event loop's thread, for each window."""
        load = self.load
        loop = asyncio.get_running_loop()
        self._measured = loop.create_future()
        gc.collect()  # of the runs before
        async with Engine(self._model, device=self._device, **self._settings()) as engine:
            if self._parts is not None:
                self._parts.attach(engine)
            streams = [self._submit(engine, index) for index in range(load.batch)]
            if self._read:
                readers = [loop.create_task(_read(stream)) for stream in streams]
                streams.clear()  # each belongs to its reader
                async with ending(readers):
                    await self._measured
            else:
                await self._measured
        gc.unfreeze()
        marks = self._marks
        return [(b - a) / load.window for a, b in pairwise(marks)]

    @property
    def _warm_up(self) -> int:
        return self.load.window

    def _settings(self) -> dict[str, Any]:
        load = self.load
        return {
            "overlap_depth": load.depth,
            "prefix_cache": load.features != "plain",
            "page_size": PAGE_SIZE,
            "kv_tokens": load.batch * (PROMPT_TOKENS + self._max_tokens + 2 * PAGE_SIZE),
            "prefill_chunk_tokens": 128 * PROMPT_TOKENS,
            "max_running_requests": load.batch,
            "max_queued_requests": load.batch,
            **({} if self._read else {"max_unread_tokens": 2**31 - 1}),
        }

    @property
    def _max_tokens(self) -> int:
        """Enough for all steps: the first stream decodes while the last is admitted."""
        load = self.load
        return self._warm_up + load.window * (load.windows + 1) + load.batch // 32 + 64

    def _submit(self, engine: Engine, index: int) -> TokenStream:
        fields = dict(FEATURES[self.load.features])
        stops = fields.pop("stops", False)
        if self._tokenizer is None:
            fields.pop("stop", None)
        params = SamplingParams(
            **{
                "temperature": 0.0,
                "max_tokens": self._max_tokens,
                "ignore_eos": not stops,
                "stop_token_ids": (self._stop_id,) if stops else (),
                "seed": index,
            }
            | fields
        )
        draw = np.random.default_rng(index)
        prompt = draw.integers(0, self._model.vocab_size, PROMPT_TOKENS).tolist()
        return engine.generate(prompt, params, deadline=DEADLINE if stops else None)

    def _on_step(self, inputs: StepInputs) -> None:
        if inputs.num_decodes != self.load.batch or len(inputs.rows) != self.load.batch:
            return
        self._full_steps += 1
        done = self._full_steps - self._warm_up
        measured = self._measured
        if done < 0 or done % self.load.window or measured is None or measured.done():
            return
        if done == 0:  # as a server does once it is up: what is there stays
            gc.collect()
            gc.freeze()
        if self._parts is not None:
            self._parts.next_window()
        self._marks.append(thread_time())
        if len(self._marks) > self.load.windows:
            measured.set_result(None)


async def _read(stream: TokenStream) -> None:
    async for _ in stream:
        pass


async def plain_asyncio(
    batch: int, window: int, windows: int, clock: Callable[[], float] = thread_time
) -> list[float]:
    """What asyncio alone takes for the same fan-out, in seconds of CPU time a step.

    One future and one wake-up for each row and step, and nothing else.
    """
    loop = asyncio.get_running_loop()
    waiting: list[asyncio.Future[None]] = []

    async def reader() -> None:
        while True:
            future = loop.create_future()
            waiting.append(future)
            await future

    marks = []
    async with ending([loop.create_task(reader()) for _ in range(batch)]):
        for step in range(window * windows + 1):
            if step % window == 0:
                marks.append(clock())
            woken, waiting = waiting, []
            for future in woken:
                future.set_result(None)
            await asyncio.sleep(0)
    return [(b - a) / window for a, b in pairwise(marks)]
