"""Run parts, each in a process of its own and within its time.

What goes wrong on a GPU stays wrong for the process that did it, memory is only given back for sure
by a process that ends, and one that hangs can be killed: so a part that fails costs its own rows.
"""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import msgspec

from aiosched.bench.gpu.settings import Part, Settings

Row = dict[str, Any]

CHILD = (sys.executable, "-m", "aiosched.bench.gpu.child")


async def run_part(
    part: Part, settings: Settings, seconds: float, command: Sequence[str] = CHILD
) -> AsyncGenerator[Row, None]:
    """The rows of ``part`` as they come; the last one has an ``error`` if it was cut short.

    Args:
        seconds: after which it is ended.
        command: what is run, with the part's name and the settings behind it.
    """
    process = await asyncio.create_subprocess_exec(
        *command,
        part.name,
        msgspec.json.encode(settings).decode(),
        stdin=PIPE,  # it ends with this process
        stdout=PIPE,
        stderr=PIPE,
        limit=2**20,
    )
    assert process.stdout is not None and process.stderr is not None
    said = asyncio.create_task(_last_line(process.stderr))
    failed = False
    try:
        async with asyncio.timeout(seconds):
            async for line in process.stdout:
                row = msgspec.json.decode(line)
                failed = failed or "error" in row
                yield row
            await process.wait()
            if process.returncode and not failed:
                yield {"error": f"exit code {process.returncode}: {await said}"}
    except TimeoutError:
        yield {"error": f"ended after {seconds:.0f} s"}
    finally:
        await _end(process)
        said.cancel()


async def _last_line(stream: asyncio.StreamReader) -> str:
    last = b""
    async for line in stream:
        last = line if line.strip() else last
    return last.decode(errors="replace").strip()


async def _end(process: Process) -> None:
    if process.returncode is None:
        process.kill()
    await process.wait()
