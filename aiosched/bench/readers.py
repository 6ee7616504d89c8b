"""Tasks that read streams, and their end: before that of the engine, whatever happens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any


@asynccontextmanager
async def ending(readers: Sequence[asyncio.Task[Any]]) -> AsyncIterator[None]:
    """After the block, however it is left, the tasks are cancelled and have ended.

    One that is left to itself meets a closed engine, and nobody looks at its exception.
    """
    try:
        yield
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
