"""Builds the C++ of this package with the machine's compiler, once per machine and version."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
from functools import cache
from pathlib import Path

from aiosched.errors import ModelLoadError
from aiosched.model.native.scratch import scratch_folder

SOURCE = Path(__file__).with_name("decode.cpp")
HEADERS = sorted(SOURCE.parent.glob("*.h"))
COMPILERS = ("c++", "g++", "clang++")
# Products and sums may be fused and reordered by hand only: no -ffast-math, which would change how
# the whole process treats denormal numbers.
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fPIC", "-shared", "-pthread", "-fno-math-errno")

LIBRARY, CHECKSUM = "decode.so", "decode.sha256"


def load_native(cache_dir: Path) -> ctypes.CDLL:
    """The library, built first if ``cache_dir`` has none for this source, compiler and CPU.

    A build takes some three seconds. Several processes may build at once: each puts the complete
    folder in place by a rename. A file that is not what was built, or can no longer be loaded, is
    built again.

    Raises:
        ModelLoadError: there is no compiler, or it fails, or what it makes cannot be loaded.
    """
    if os.name != "posix":
        raise ModelLoadError(f"compile: {platform.system()} is not supported; leave compile off")
    command = _compiler()
    texts = [path.read_text() for path in (SOURCE, *HEADERS)]
    decides = "\0".join((*texts, *command, *FLAGS, _version(tuple(command)), _cpu()))
    name = hashlib.sha256(decides.encode()).hexdigest()[:20]
    target = cache_dir / "native" / f"decode-{name}"
    try:
        return _loaded(target) or _build(command, target)
    except OSError as error:
        raise ModelLoadError(f"compile: {target} cannot be built or loaded: {error}") from error


def _build(command: list[str], target: Path) -> ctypes.CDLL:
    """Build, load, and put in place at ``target``, in this order."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with scratch_folder(target.parent) as scratch:
        folder = scratch / target.name
        folder.mkdir()
        library = folder / LIBRARY
        _run([*command, *FLAGS, str(SOURCE), "-o", str(library)])
        if not library.is_file():
            raise ModelLoadError(f"compile: {shlex.join(command)} wrote no library: is CXX right?")
        try:
            built = ctypes.CDLL(str(library))
        except OSError as error:
            raise ModelLoadError(
                f"compile: what {shlex.join(command)} built cannot be loaded (is CXX right?): "
                f"{error}"
            ) from error
        (folder / CHECKSUM).write_text(_digest(library))
        if there := _loaded(target):  # another process was faster
            return there
        shutil.rmtree(target, ignore_errors=True)
        with contextlib.suppress(OSError):
            folder.rename(target)
    return _loaded(target) or built


def _loaded(folder: Path) -> ctypes.CDLL | None:
    """What was built there; ``None`` if it is not that, or cannot be loaded."""
    try:
        # Before it is loaded: the loader would end the process on a file that was cut short.
        if (folder / CHECKSUM).read_text() != _digest(folder / LIBRARY):
            return None
        return ctypes.CDLL(str(folder / LIBRARY))
    except (OSError, UnicodeDecodeError):
        return None


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _compiler() -> list[str]:
    if given := os.environ.get("CXX"):
        try:
            command = shlex.split(given)
        except ValueError as error:
            raise ModelLoadError(f"compile: CXX={given!r} is no command: {error}") from error
        if not command:
            raise ModelLoadError(f"compile: CXX={given!r} names no compiler")
        return command
    for name in COMPILERS:
        if found := shutil.which(name):
            return [found]
    raise ModelLoadError(
        f"compile: there is no C++ compiler ({', '.join(COMPILERS)}); install one, name it in the "
        "environment variable CXX, or leave compile off"
    )


@cache
def _version(command: tuple[str, ...]) -> str:
    return _run([*command, "--version"])


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace"
        )
    except OSError as error:
        raise ModelLoadError(f"compile: {command[0]} cannot be run: {error}") from error
    if done.returncode != 0:
        said = done.stderr.strip().splitlines() or [f"it ended with code {done.returncode}"]
        raise ModelLoadError(f"compile: {command[0]} failed: {said[0]}")
    return done.stdout


def _cpu() -> str:
    """What decides how ``-march=native`` is understood."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine() + platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
