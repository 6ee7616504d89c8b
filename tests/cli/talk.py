"""A program for test_interrupts: the command line over a model of integers.

Run as ``python talk.py [--asyncio] [--terminal] ARGS…``.
"""

from __future__ import annotations

import fcntl
import sys
import termios

from talking_model import TalkingModel

from aiosched.cli.app import app
from aiosched.commands.plug import Plug

args = sys.argv[1:]
if "--asyncio" in args:
    args.remove("--asyncio")
    sys.modules["uvloop"] = None  # type: ignore[assignment]
if "--terminal" in args:
    args.remove("--terminal")
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # Ctrl-C typed there is a signal for this process
app(args, prog_name="aiosched", obj=Plug(TalkingModel(max_model_len=1 << 20)))
