"""Runs a compiler that ends when this process does, whatever ends that."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress

# It waits at a pipe that only this process holds open: a pipe ends with its holder, be that killed.
_WATCH = 'read -r line; kill -s TERM -- "-$0"'


def run_tied(command: list[str]) -> subprocess.CompletedProcess[str]:
    """Run it to its end and return what it wrote.

    It gets a process group of its own, because a compiler is a driver and the passes that it
    starts. All of them get a SIGTERM if this call is interrupted, or this process ends before it.

    Raises:
        OSError: it cannot be started.
    """
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        process_group=0,
    ) as process:
        try:
            with _watched(process.pid):
                out, errors = process.communicate()
        except BaseException:
            with suppress(OSError):  # it has just ended
                os.killpg(process.pid, signal.SIGTERM)
            process.wait()
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, errors)


@contextmanager
def _watched(group: int) -> Iterator[None]:
    with subprocess.Popen(
        ["/bin/sh", "-c", _WATCH, str(group)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        process_group=0,  # Ctrl-C at a terminal must not end it before its time
    ) as watcher:
        try:
            yield
        finally:
            watcher.kill()
