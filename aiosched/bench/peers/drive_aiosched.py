"""aiosched, for ``child.py``. Settings beyond the common ones are those of ``EngineConfig``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from aiosched import Engine, SamplingParams, __version__


def open_engine(settings: dict[str, Any]) -> tuple[str, Callable[..., list[list[int]]]]:
    engine = Engine(
        settings["model"],
        device="cpu",
        dtype=settings["dtype"],
        prefix_cache=False,
        **settings["engine"],
    )
    loop = _new_loop()
    loop.run_until_complete(engine.open())

    async def answers(prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
        done = await asyncio.gather(*(engine.complete(prompt, params) for prompt in prompts))
        return [list(completion.token_ids) for completion in done]

    def generate(prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        return loop.run_until_complete(answers(prompts, new_tokens))

    return __version__, generate


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        from uvloop import new_event_loop
    except ImportError:
        return asyncio.new_event_loop()
    return new_event_loop()
