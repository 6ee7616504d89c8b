"""One phase of ``aiosched bench lag``: the lag of the loop while it serves another process."""

from __future__ import annotations

import asyncio
import json
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from time import perf_counter
from typing import Any

import click
import msgspec

from aiosched.bench.idle import until_idle
from aiosched.bench.lag import client
from aiosched.bench.lag.ticker import (
    percentile_ms,
    ticking,
    watching_collections,
)
from aiosched.engine import Engine


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What the client asks for.

    Attributes:
        seconds: that are measured, once every stream has begun.
        large_every: seconds from one large prompt to the next; 0: none.
        large_bytes: its size.
    """

    streams: int
    seconds: float
    large_every: float = 0.0
    large_bytes: int = 0


class Phase(msgspec.Struct, frozen=True, kw_only=True):
    """What was seen. Times in milliseconds.

    Attributes:
        gc_max_ms: the longest pause of the garbage collector.
        tok_s: tokens a second that the engine sampled.
        large: ``[status, seconds, text]`` of each answer to a large prompt.
    """

    p50_ms: float
    p99_ms: float
    max_ms: float
    ping_p50_ms: float
    ping_p99_ms: float
    gc_max_ms: float
    tok_s: float
    large: list[tuple[int, float, str]]


async def run_phase(engine: Engine, port: int, load: Load) -> Phase:
    """Measure while the client loads the app behind ``port``."""
    await until_idle(engine)  # the streams of the client before are gone
    async with _client(port, load) as process:
        await _line(process)
        tokens, began = engine.stats().tokens, perf_counter()
        with watching_collections() as collections:
            async with ticking() as lags:
                seen = json.loads(await _line(process))
        seconds = perf_counter() - began
        tokens = engine.stats().tokens - tokens
    pings: list[float] = seen["pings"]
    return Phase(
        p50_ms=percentile_ms(lags, 50),
        p99_ms=percentile_ms(lags, 99),
        max_ms=percentile_ms(lags, 100),
        ping_p50_ms=percentile_ms(pings, 50),
        ping_p99_ms=percentile_ms(pings, 99),
        gc_max_ms=max(collections.pauses, default=0.0) * 1e3,
        tok_s=tokens / seconds,
        large=seen["large"],
    )


@asynccontextmanager
async def _client(port: int, load: Load) -> AsyncIterator[Process]:
    options: dict[str, Any] = {
        "--streams": load.streams,
        "--seconds": load.seconds,
        "--large-every": load.large_every,
        "--large-bytes": load.large_bytes,
    }
    arguments = [str(part) for option in options.items() for part in option]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        client.__file__,
        str(port),
        *arguments,
        stdin=PIPE,  # it ends with this process
        stdout=PIPE,
        limit=2**26,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _line(process: Process) -> bytes:
    assert process.stdout is not None
    line = await process.stdout.readline()
    if not line:
        raise click.ClickException("the client of bench lag ended before its time")
    return line
