"""How much memory of the host a process may still take."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

MEMINFO = Path("/proc/meminfo")
CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")  # of a container, as seen from within


def available_bytes() -> int | None:
    """What can be had without swapping, and a container allows in all; ``None`` if unknown."""
    found = [n for n in (_of_machine(), _of_container()) if n is not None]
    return min(found, default=None)


def _of_machine() -> int | None:
    with contextlib.suppress(OSError):
        found = re.search(r"^MemAvailable:\s+(\d+) kB", MEMINFO.read_text(), re.MULTILINE)
        if found:
            return int(found[1]) * 1024
    with contextlib.suppress(AttributeError, ValueError, OSError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def _of_container() -> int | None:
    with contextlib.suppress(OSError, ValueError):  # without a limit it says "max"
        return int(CONTAINER_LIMIT.read_text())
    return None
