"""Folders of builds under way, and what is left of builds that were killed."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

PREFIX = "build-"
ABANDONED = 600.0
"""Seconds after which a folder that nobody holds is taken for one of a killed build."""


@contextmanager
def scratch_folder(parent: Path) -> Iterator[Path]:
    """A new folder in ``parent`` within the block; abandoned ones are removed first.

    Raises:
        OSError: it cannot be made.
    """
    _sweep(parent)
    folder = tempfile.TemporaryDirectory(dir=parent, prefix=PREFIX, ignore_cleanup_errors=True)
    with folder as name, ExitStack() as held:
        with suppress(OSError):  # a file system without locks: there, nothing is swept
            held.enter_context(_hold(Path(name)))
        yield Path(name)


def _sweep(parent: Path) -> None:
    for folder in parent.glob(f"{PREFIX}*"):
        # The age, because a folder is made before it is held.
        with suppress(OSError):
            if time.time() - folder.stat().st_mtime > ABANDONED:
                with _hold(folder):
                    shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _hold(folder: Path) -> Iterator[None]:
    """A lock that ends with the process.

    Raises:
        OSError: another process has it, or the file system has no locks.
    """
    import fcntl  # not on Windows

    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)
