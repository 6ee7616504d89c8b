"""Wait for an engine to be done, between one measurement and the next."""

from __future__ import annotations

import asyncio

from aiosched.engine import Engine


async def until_idle(engine: Engine) -> None:
    """Until no request is left in ``engine``."""
    while (stats := engine.stats()).running + stats.paused + stats.waiting:  # noqa: ASYNC110
        await asyncio.sleep(0.005)
