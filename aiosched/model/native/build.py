"""Builds the C++ of this package with the machine's compiler, once per machine and version."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from aiosched.errors import ModelLoadError

SOURCE = Path(__file__).with_name("decode.cpp")
HEADERS = sorted(SOURCE.parent.glob("*.h"))
COMPILERS = ("c++", "g++", "clang++")
# Products and sums may be fused and reordered by hand only: no -ffast-math, which would change how
# the whole process treats denormal numbers.
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fPIC", "-shared", "-pthread", "-fno-math-errno")


def load_native(cache_dir: Path) -> ctypes.CDLL:
    """The library, built first if ``cache_dir`` has none for this source, compiler and CPU.

    A build takes some three seconds. Several processes may build at once: each puts the complete
    file in place by a rename.

    Raises:
        ModelLoadError: there is no compiler, or it fails.
    """
    command = _compiler()
    texts = [path.read_text() for path in (SOURCE, *HEADERS)]
    decides = "\0".join((*texts, *command, *FLAGS, _version(tuple(command)), _cpu()))
    name = hashlib.sha256(decides.encode()).hexdigest()[:20]
    target = cache_dir / "native" / f"decode-{name}.so"
    try:
        if not target.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=target.parent, prefix="build-") as folder:
                built = Path(folder) / "decode.so"
                _run([*command, *FLAGS, str(SOURCE), "-o", str(built)])
                os.replace(built, target)
        return ctypes.CDLL(str(target))
    except OSError as error:
        raise ModelLoadError(f"compile: {target} cannot be built or loaded: {error}") from error


def _compiler() -> list[str]:
    if given := os.environ.get("CXX"):
        return shlex.split(given)
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
