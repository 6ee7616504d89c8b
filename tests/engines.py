"""What engine tests share: a small engine on a simulated device, and the baseline."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from aiosched import Engine, SamplingParams, TokenStream
from aiosched.device.sim import SimDevice
from aiosched.model.inputs import StepInputs
from aiosched.testing.hash_model import HashModel, oracle

DEPTHS = (0, 1, 2)
PAGE_SIZES = (1, 16)


def greedy(max_tokens: int | None = 8, **fields: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **fields)


def slow_device() -> SimDevice:
    """Steps take time, and their results more: with overlap there is always one in flight."""
    return SimDevice(forward_time=0.01, copy_time=0.005)


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


class PieceTokenizer:
    """A tokenizer of ``TokenizerLike`` that decodes each id to a piece of its own, "?" by default.

    Attributes:
        decoded: how many ids were given to ``decode``.
    """

    eos_token_ids: tuple[int, ...] = ()
    special_ids: frozenset[int] = frozenset()
    chat_template = None

    def __init__(self, pieces: Mapping[int, str], vocab_size: int = 64) -> None:
        self.vocab_size = vocab_size
        self.decoded = 0
        self._pieces = pieces

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        ids = {piece: token for token, piece in self._pieces.items()}
        return [ids[char] for char in text]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        self.decoded += len(ids)
        return "".join(self._pieces.get(token, "?") for token in ids)

    def render_chat(self, messages: Any, add_generation_prompt: bool = True) -> str:
        return "".join(message["content"] for message in messages)


def prompt(seed: int, length: int, vocab_size: int = 64) -> list[int]:
    """``length`` random token ids, the same for the same seed."""
    draw = random.Random(seed)
    return [draw.randrange(vocab_size) for _ in range(length)]


def prompt_whose_answer_is_new_at(*places: int, length: int = 6) -> list[int]:
    """A prompt to which each of these tokens of the oracle's answer occurs there first."""
    for seed in itertools.count():
        ids = prompt(seed, length)
        answer = oracle(ids, max(places) + 1)
        if all(answer[place] not in ids + answer[:place] for place in places):
            return ids
    raise AssertionError


async def tokens_of(stream: TokenStream) -> list[int]:
    """Read a stream to its end."""
    return [token.id async for token in stream if token.id is not None]


async def turns(count: int = 40) -> None:
    """Let everybody else run for some turns of the loop: all that can happen without a gate."""
    for _ in range(count):
        await asyncio.sleep(0)


async def until(condition: Callable[[], object], limit: int = 20_000) -> None:
    """Let everybody else run until ``condition()`` holds, for a bounded number of turns."""
    for turn in range(limit):
        if condition():
            return
        await asyncio.sleep(0 if turn % 50 else 0.001)  # virtual time stands while anybody runs
    raise AssertionError("what was waited for did not happen")


async def settle(engine: Engine, limit: int = 20_000) -> None:
    """Until the scheduler sleeps: nothing is in flight, nobody runs and nobody waits."""
    await turns(1)
    await until(lambda: engine._runtime.inbox._sleeper is not None, limit)


def launches(device: SimDevice) -> list[int]:
    """The steps whose forward was launched so far."""
    return [r.step for r in device.trace if (r.kind, r.label) == ("launch", "forward")]


def before_plan(engine: Engine, arrivals: dict[int, Callable[[], object]]) -> None:
    """Call ``arrivals[k]`` right before step ``k`` is planned, which includes what it submits."""
    runtime = engine._runtime
    plan = runtime._scheduler.plan

    def planned() -> Any:
        arrive = arrivals.pop(runtime._state.step + 1, None)
        if arrive is not None:
            arrive()
            runtime.intake()
        return plan()

    runtime._scheduler.plan = planned
