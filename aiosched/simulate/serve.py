"""Serving a trace: the same client for simulated engines and for real ones."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from aiosched.engine import Engine
from aiosched.errors import AioschedError, PromptTooLong
from aiosched.params import SamplingParams
from aiosched.simulate.router import Router
from aiosched.simulate.trace import TraceRequest


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a request. Times in seconds.

    Attributes:
        index: its place in the trace.
        arrival: since the trace began, like ``end``.
        ttft: time to first token, from the arrival; ``None`` if none came.
        end: when its last token came, or when it failed.
        tokens: in its answer.
        cached_tokens: of its prompt, found in the prefix cache.
        error: the name of the error that it met.
    """

    index: int
    replica: int
    arrival: float
    ttft: float | None
    end: float
    tokens: int
    cached_tokens: int
    error: str | None = None

    @property
    def e2e(self) -> float:
        """Seconds from the arrival to the last token."""
        return self.end - self.arrival

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first; ``None`` for an answer of one."""
        if self.ttft is None or self.tokens < 2:
            return None
        return (self.e2e - self.ttft) / (self.tokens - 1)


class Prompts:
    """Token ids for the requests of a trace: equal where they share a prefix, else random.

    Args:
        vocab_size: ids are below this.
        seed: another one makes other ids.
    """

    def __init__(self, vocab_size: int, seed: int = 0) -> None:
        self._vocab_size = vocab_size
        self._seed = seed
        self._prefixes: dict[tuple[str, int], NDArray[np.int32]] = {}

    def of(self, index: int, request: TraceRequest) -> NDArray[np.int32]:
        """The prompt of the request at ``index`` of the trace."""
        own = self._draw((0, index), request.prompt_tokens - request.prefix_tokens)
        if request.prefix_id is None:
            return own
        key = request.prefix_id, request.prefix_tokens
        if key not in self._prefixes:
            name = zlib.crc32(request.prefix_id.encode())
            # Lengths of one prefix may differ: the shorter one begins the longer one.
            self._prefixes[key] = self._draw((1, name), request.prefix_tokens)
        return np.concatenate([self._prefixes[key], own])

    def _draw(self, seed: tuple[int, int], count: int) -> NDArray[np.int32]:
        uniform = np.random.default_rng((self._seed, *seed)).random(count)
        return (uniform * self._vocab_size).astype(np.int32)


def longest_prompt(engine: Engine) -> int:
    """The longest prompt that an open engine takes, in tokens."""
    config, model = engine.config, engine.model
    longest = min(model.max_model_len, config.max_model_len or model.max_model_len) - 1
    return min(longest, engine.stats().kv_pages_total * config.page_size)


class Fleet:
    """Engines behind a router, and their only client.

    Args:
        token_by_token: read each token as it comes, as users do. In virtual time it changes
            nothing but how long the simulation takes: else only the first token wakes a reader,
            and the last.

    Attributes:
        loads: unfinished requests of each.
    """

    def __init__(self, engines: Sequence[Engine], *, token_by_token: bool = False) -> None:
        self.engines = engines
        self._token_by_token = token_by_token
        self.loads = [0] * len(engines)

    async def serve(
        self, trace: Sequence[TraceRequest], router: Router, seed: int = 0
    ) -> list[Served]:
        """Send each request at its time to the engine that ``router`` picks; read its answer.

        The time is the event loop's, real or virtual; the trace begins now. Answers have the
        length that the trace says, whatever the model would like. A request that an engine
        refuses, or that fails, is a result like another.

        Args:
            trace: ordered by arrival.
            seed: of the token ids, which are the same for the same seed.
        """
        loop = asyncio.get_running_loop()
        began = loop.time()
        prompts = Prompts(min(engine.model.vocab_size for engine in self.engines), seed)
        longest = [longest_prompt(engine) for engine in self.engines]
        readers = []
        for index, request in enumerate(trace):
            if (wait := began + request.arrival - loop.time()) > 0:
                await asyncio.sleep(wait)
            replica = router.route(request, self.loads)
            self.loads[replica] += 1
            prompt = None
            if request.prompt_tokens <= longest[replica]:  # else it may not even fit the memory
                prompt = prompts.of(index, request)
            readers.append(loop.create_task(self._read(began, index, request, prompt, replica)))
        return list(await asyncio.gather(*readers))

    async def _read(
        self,
        began: float,
        index: int,
        request: TraceRequest,
        prompt: NDArray[np.int32] | None,
        replica: int,
    ) -> Served:
        """Send one request and wait for its answer. ``prompt``: ``None`` if it is too long."""
        loop = asyncio.get_running_loop()
        ttft: float | None = None
        tokens = cached = 0
        error: str | None = None
        params = SamplingParams(temperature=0.0, max_tokens=request.output_tokens, ignore_eos=True)
        if prompt is None:
            error = PromptTooLong.__name__
        else:
            try:
                stream = self.engines[replica].generate(prompt, params, request_id=str(index))
                async with stream:
                    await anext(stream)
                    ttft = loop.time() - began - request.arrival
                    if self._token_by_token:
                        async for _ in stream:
                            pass
                    answer = await stream
                tokens, cached = answer.usage.completion_tokens, answer.usage.cached_tokens
            except AioschedError as failure:
                error = type(failure).__name__
        self.loads[replica] -= 1
        return Served(
            index=index,
            replica=replica,
            arrival=request.arrival,
            ttft=ttft,
            end=loop.time() - began,
            tokens=tokens,
            cached_tokens=cached,
            error=error,
        )
