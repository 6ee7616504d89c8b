"""How the process of a measurement ends when the one that started it is gone."""

from __future__ import annotations

import os
import signal
import threading


def end_with_parent() -> None:
    """From now on the process ends as soon as its standard input does.

    The parent holds a pipe to it open and writes nothing, so that this holds for one that is
    killed, too, and on every system. What the main thread does makes no difference. Ctrl-C, which a
    terminal sends to both, is the parent's alone.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_input, name="aiosched-parent", daemon=True).start()


def _end_with_input() -> None:
    # Not by sys.stdin: Python dies on the way out if a thread holds its lock.
    while os.read(0, 4096):
        pass
    os._exit(1)
