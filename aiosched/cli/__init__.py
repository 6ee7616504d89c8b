"""The command line, ``aiosched``.

This is the edge of the library: only in commands, these and the benchmarks, is the environment
read, are signals handled and logs configured, and does uvloop come in. What commands share lies in
``aiosched.commands``; nothing imports this package.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from importlib.util import find_spec

from aiosched.commands.running import INTERRUPTED, TERMINATED, Terminated, terminate


def main() -> None:
    """Entry point of the ``aiosched`` script. Ends the process with its exit code."""
    try:
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, terminate)
        _main()
    except Terminated:  # before there was a command, as below
        _exit_now(TERMINATED)
    except KeyboardInterrupt:
        _exit_now(INTERRUPTED)
    except SystemExit as end:
        if end.code in (INTERRUPTED, TERMINATED):
            _exit_now(int(end.code))
        raise


def _exit_now(code: int) -> None:
    """End after a signal, when the command has cleaned up.

    Python's own way out would wait for threads, or abort the process if one of them is in C++ code,
    as it is while a model is loaded.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # closed, or nobody reads it
            stream.flush()
    os._exit(code)


def _main() -> None:
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
