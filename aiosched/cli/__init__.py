"""The command line, ``aiosched``.

This is the edge of the library: only in commands, these and the benchmarks, is the environment
read, are signals handled and logs configured, and does uvloop come in. What commands share lies in
``aiosched.commands``; nothing imports this package.
"""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec


def main() -> None:
    """Entry point of the ``aiosched`` script. Ends the process with its exit code."""
    missing = _missing_packages()
    if missing:
        names = ", ".join(missing)
        print(
            f"Error: the command line needs {names}: pip install 'aiosched-engine[cli]'",
            file=sys.stderr,
        )
        sys.exit(1)
    _open_standard_streams()
    from aiosched.cli.app import app

    app(prog_name="aiosched")


def _open_standard_streams() -> None:
    """Put the null device where a standard stream was closed (``aiosched … >&-``).

    Its number would go to the next file or socket that is opened, and uvloop dies of that.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            # The lowest free number is taken, and all lower ones are in use by now.
            stream = open(os.devnull, "r" if name == "stdin" else "w")  # noqa: SIM115
            setattr(sys, name, stream)


def _missing_packages() -> list[str]:
    needed = ["click", "rich"]
    if sys.platform != "win32":  # where there is no uvloop, and asyncio serves
        needed.append("uvloop")
    return [name for name in needed if find_spec(name) is None]
