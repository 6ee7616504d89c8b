"""What engine tests share: a small engine on a simulated device, and the baseline."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

from aiosched import Engine, SamplingParams, TokenStream
from aiosched.device.sim import SimDevice
from aiosched.model.inputs import StepInputs
from aiosched.testing.hash_model import HashModel

DEPTHS = (0, 1, 2)
PAGE_SIZES = (1, 16)


def greedy(max_tokens: int | None = 8, **fields: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **fields)


def small_engine(
    model: HashModel | None = None, device: SimDevice | None = None, **settings: Any
) -> Engine:
    """A HashModel on a simulated device, with the relay and the page pool in debug mode."""
    defaults: dict[str, Any] = {
        "kv_tokens": 1024,
        "page_size": 16,
        "prefill_chunk_tokens": 64,
        "max_running_requests": 8,
        "debug": True,
    }
    return Engine(model or HashModel(), device=device or SimDevice(), **(defaults | settings))


def assert_baseline(engine: Engine) -> None:
    """After all requests ended and the step in flight is done, nothing of them is left."""
    stats = engine.stats()
    assert (stats.running, stats.paused, stats.waiting) == (0, 0, 0)
    assert stats.kv_pages_free + stats.kv_pages_cached == stats.kv_pages_total


class WatchedModel(HashModel):
    """A HashModel that keeps the inputs of each step that it ran, in order."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.steps: list[StepInputs] = []

    def forward(self, inputs: Any, kv: object) -> Any:
        self.steps.append(inputs.host)
        return super().forward(inputs, kv)

    @property
    def batches(self) -> list[list[int]]:
        """The rows of each step."""
        return [step.rows.tolist() for step in self.steps]


def prompt(seed: int, length: int, vocab_size: int = 64) -> list[int]:
    """``length`` random token ids, the same for the same seed."""
    draw = random.Random(seed)
    return [draw.randrange(vocab_size) for _ in range(length)]


async def tokens_of(stream: TokenStream) -> list[int]:
    """Read a stream to its end."""
    return [token.id async for token in stream if token.id is not None]


async def turns(count: int = 40) -> None:
    """Let everybody else run for some turns of the loop: all that can happen without a gate."""
    for _ in range(count):
        await asyncio.sleep(0)


async def settle(engine: Engine, limit: int = 20_000) -> None:
    """Until the scheduler sleeps: nothing is in flight, nobody runs and nobody waits."""
    for _ in range(limit):
        await asyncio.sleep(0)
        if engine._runtime.inbox._sleeper is not None:
            return
    raise AssertionError("the scheduler did not come to rest")


def launches(device: SimDevice) -> list[int]:
    """The steps whose forward was launched so far."""
    return [r.step for r in device.trace if (r.kind, r.label) == ("launch", "forward")]


def before_plan(engine: Engine, arrivals: dict[int, Callable[[], object]]) -> None:
    """Call ``arrivals[k]`` right before step ``k`` is planned; what it submits is planned with it."""
    runtime = engine._runtime
    plan = runtime._scheduler.plan

    def planned() -> Any:
        arrive = arrivals.pop(runtime._state.step + 1, None)
        if arrive is not None:
            arrive()
            runtime.intake()
        return plan()

    runtime._scheduler.plan = planned
