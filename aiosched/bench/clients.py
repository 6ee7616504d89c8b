"""Clients that keep a batch at a size: one request after another, with lengths of all kinds."""

from __future__ import annotations

import asyncio

import msgspec
import numpy as np

from aiosched.engine import Engine
from aiosched.params import SamplingParams

PROMPTS = (8, 1024)  # tokens, least and most; as many between 8 and 16 as between 512 and 1024
OUTPUTS = (8, 128)


class ClientLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine is measured under.

    Attributes:
        batches: how many clients there are at once, one number after another.
        seconds: for each number in each round; a request that was begun by then is finished.
    """

    batches: tuple[int, ...]
    seconds: float
    rounds: int = 1
    seed: int = 0


async def run_clients(engine: Engine, count: int, seconds: float, seed: tuple[int, ...]) -> None:
    """``count`` clients send one request after another; each sends one at least."""
    loop = asyncio.get_running_loop()
    until = loop.time() + seconds

    async def client(number: int) -> None:
        draw = np.random.default_rng((*seed, number))
        while True:
            room = max_model_len(engine) // 2
            prompt_tokens, max_tokens = (
                min(int(low * (high / low) ** draw.random()), room)
                for low, high in (PROMPTS, OUTPUTS)
            )
            prompt = draw.integers(0, engine.model.vocab_size, prompt_tokens)
            params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
            async for _ in engine.generate(prompt, params):
                pass
            if loop.time() >= until:
                return

    await asyncio.gather(*(client(number) for number in range(count)))


def max_model_len(engine: Engine) -> int:
    """The longest sequence that an open engine takes, in tokens."""
    return min(engine.model.max_model_len, engine.config.max_model_len or 2**31)
