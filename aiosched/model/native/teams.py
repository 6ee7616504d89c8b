"""The threads that compute a compiled step, made when a step needs them."""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Teams:
    """One team at a time: for as many threads as asked for, kept until another number is.

    A forked process has none of its parent's threads: its first step makes a team of its own, and
    what it inherits of the old one is left alone. When the interpreter exits, threads that sleep
    end with the process; to stop them there would pull a team from under a step still running.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._new = library.aiosched_team
        self._new.argtypes = (ctypes.c_int64,)
        self._new.restype = ctypes.c_void_p
        self._end = library.aiosched_team_end
        self._end.argtypes = (ctypes.c_void_p,)
        self._end.restype = None
        # By process: at a fork another thread may hold the lock, and will never let go of it here.
        self._locks: dict[int, threading.Lock] = {}
        self._made_for: tuple[int, int] | None = None
        self._team = 0
        self._finalize: Callable[[], object] | None = None

    @contextmanager
    def held(self, threads: int) -> Iterator[int]:
        """Handle of the team of ``threads``, the calling one included, for one step at a time.

        Raises:
            RuntimeError: the machine gives no such number of threads.
        """
        process = os.getpid()
        with self._locks.setdefault(process, threading.Lock()):
            if self._made_for != (process, threads):
                self._replace(process, threads)
            yield self._team

    def _replace(self, process: int, threads: int) -> None:
        if self._finalize is not None:
            self._finalize()
        self._made_for = self._finalize = None
        team = self._new(threads)
        if not team:
            raise RuntimeError(f"compile: the machine gives no {threads} threads to a step")
        finalize = weakref.finalize(self, _end_team, self._end, team, process)
        finalize.atexit = False
        self._team, self._finalize = team, finalize
        self._made_for = process, threads


def _end_team(end: Callable[[int], None], team: int, process: int) -> None:
    if process == os.getpid():
        end(team)
