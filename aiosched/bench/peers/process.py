"""Starting an engine's process, asking it for tokens, and reading what it costs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import IO, Any

import msgspec

from aiosched.bench.measure import Foreign, watching_others

CHILD = Path(__file__).with_name("child.py")
START_TIMEOUT = 300.0
RUN_TIMEOUT = 120.0
END_TIMEOUT = 5.0
_LONGEST_LINE = 1 << 26


class EngineProcessFailed(Exception):
    """The process ended, or did not answer in time; the message is the last line of its errors."""


class Answer(msgspec.Struct, frozen=True):
    """What one order gave.

    Attributes:
        seconds: from the order to the last token, read in the engine's own process.
        token_ids: new tokens of each prompt.
    """

    seconds: float
    token_ids: list[list[int]]


class _Started(msgspec.Struct, frozen=True):
    version: str


class EngineProcess:
    """One engine in a process of its own, idle between orders.

    Args:
        python: the interpreter of its environment.
        driver: name of the script beside ``child.py`` that opens it.
        settings: what the driver reads; must be JSON.
        environ: variables beyond this process's own.

    Attributes:
        version: of the engine; empty before ``start``.
        start_s: from the start of the process to the first token, in seconds.
    """

    def __init__(
        self,
        python: str,
        driver: str,
        settings: Mapping[str, Any],
        environ: Mapping[str, str] | None = None,
    ) -> None:
        script = str(CHILD.with_name(f"drive_{driver}.py"))
        self._command = (python, str(CHILD), script, json.dumps(settings))
        self._environ = {**os.environ, **(environ or {})}
        self._process: asyncio.subprocess.Process | None = None
        self._errors: IO[bytes] | None = None
        self.version = ""
        self.start_s = float("nan")

    async def start(self) -> None:
        """Start it and wait for its first token.

        Raises:
            EngineProcessFailed: it gave none.
        """
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # until close
        began = perf_counter()
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=self._errors,
                env=self._environ,
                start_new_session=True,  # so that its own children can be found and ended
                limit=_LONGEST_LINE,
            )
        except OSError as error:
            raise EngineProcessFailed(str(error)) from error
        started = msgspec.json.decode(await self._line(START_TIMEOUT), type=_Started)
        self.start_s = perf_counter() - began
        self.version = started.version

    async def generate(
        self, prompts: Sequence[Sequence[int]], new_tokens: int
    ) -> tuple[Answer, Foreign]:
        """The answer to one order, and what others used of the machine meanwhile.

        Raises:
            EngineProcessFailed: it did not answer, or not with ``new_tokens`` for each prompt.
        """
        process = self._process
        assert process is not None and process.stdin is not None
        order = {"prompts": prompts, "new_tokens": new_tokens}
        before, began = self._cpu_seconds(), perf_counter()
        with watching_others() as others:
            process.stdin.write(msgspec.json.encode(order) + b"\n")
            answer = msgspec.json.decode(await self._line(RUN_TIMEOUT), type=Answer)
        used = (self._cpu_seconds() - before) / (perf_counter() - began)
        others.cores = max(0.0, others.cores - used)
        lengths = [len(ids) for ids in answer.token_ids]
        if lengths != [new_tokens] * len(prompts):
            raise EngineProcessFailed(
                f"{len(prompts)} prompts with {new_tokens} new tokens each gave {lengths}"
            )
        return answer, others

    def rss_mb(self) -> float | None:
        """Resident memory of the process and its children in MiB; ``None`` without ``/proc``."""
        pages = [int(stat[21]) for stat in self._stats()]
        return sum(pages) * os.sysconf("SC_PAGE_SIZE") / 2**20 if pages else None

    async def close(self) -> None:
        """End it, and whatever it started."""
        process = self._process
        if process is not None:
            assert process.stdin is not None
            process.stdin.close()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), END_TIMEOUT)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.communicate()
        if self._errors is not None:
            self._errors.close()

    async def _line(self, timeout: float) -> bytes:
        process = self._process
        assert process is not None and process.stdout is not None
        try:
            line = await asyncio.wait_for(process.stdout.readline(), timeout)
        except TimeoutError:
            raise EngineProcessFailed(f"no answer within {timeout:g} s") from None
        if not line:
            raise EngineProcessFailed(await self._why_it_ended())
        return line

    async def _why_it_ended(self) -> str:
        assert self._process is not None and self._errors is not None
        code = await self._process.wait()
        if code < 0:  # nothing it said before has to do with it
            return f"it was ended by {signal.Signals(-code).name}"
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), None)
        return last or f"it ended with code {code}"

    def _cpu_seconds(self) -> float:
        """That the process and its children have used; 0 without ``/proc``."""
        ticks = sum(int(field) for stat in self._stats() for field in stat[11:15])
        return ticks / os.sysconf("SC_CLK_TCK")

    def _stats(self) -> list[list[str]]:
        """Of every process in the session: the fields of ``/proc/PID/stat`` from its state on."""
        assert self._process is not None
        found = []
        for path in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):  # one that ended meanwhile
                # The name before may hold spaces and parentheses.
                fields = path.read_text(errors="replace").rpartition(") ")[2].split()
                if int(fields[3]) == self._process.pid:
                    found.append(fields)
        return found
