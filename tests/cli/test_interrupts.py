"""Ctrl-C, typed at a terminal of its own: the signal goes the whole way."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

pty = pytest.importorskip("pty", reason="needs a pseudo-terminal")

HERE = Path(__file__).parent
ENDLESS = ("--max-tokens", "500000", "--kv-tokens", "500000", "--temperature", "0")
CTRL_C, CTRL_D = b"\x03", b"\x04"
PATIENCE = 60.0  # seconds; torch is imported meanwhile


class Terminal:
    """A program and the terminal that it talks to."""

    def __init__(self, program: subprocess.Popen[bytes], master: int) -> None:
        self.program = program
        self._master = master
        self._unread = b""

    def type(self, keys: bytes) -> None:
        os.write(self._master, keys)

    def wait(self) -> None:
        """Until something more is shown."""
        if not self._unread:
            assert select.select([self._master], [], [], PATIENCE)[0]

    def until(self, text: bytes) -> bytes:
        """What is shown up to ``text`` and with it."""
        shown, self._unread = self._unread, b""
        deadline = time.monotonic() + PATIENCE
        while text not in shown:
            assert select.select([self._master], [], [], deadline - time.monotonic())[0], shown
            shown += os.read(self._master, 4096)
        end = shown.index(text) + len(text)
        self._unread = shown[end:]
        return shown[:end]

    def ended(self) -> int:
        """Its exit code. What it still shows is read, or it could not end."""
        deadline = time.monotonic() + PATIENCE
        while self.program.poll() is None:
            assert time.monotonic() < deadline, "it does not end"
            if select.select([self._master], [], [], 0.05)[0]:
                try:
                    self._unread += os.read(self._master, 4096)
                except OSError:  # the terminal's other side is closed
                    return self.program.wait(PATIENCE)
        return self.program.returncode

    @property
    def rest(self) -> bytes:
        return self._unread


@contextmanager
def started(args: Sequence[str]) -> Iterator[Terminal]:
    master, slave = pty.openpty()
    environ = {k: v for k, v in os.environ.items() if not k.startswith("AIOSCHED_")}
    program = subprocess.Popen(
        [sys.executable, str(HERE / "talk.py"), "--terminal", *args],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
        env=environ | {"PYTHONPATH": str(HERE.parent), "TERM": "xterm"},
    )
    os.close(slave)
    try:
        yield Terminal(program, master)
    finally:
        program.kill()
        program.wait()
        os.close(master)


@pytest.mark.parametrize("loop", [[], ["--asyncio"]], ids=["uvloop", "asyncio"])
def test_ctrl_c_in_a_chat_stops_the_answer_and_then_the_program(loop: list[str]) -> None:
    with started([*loop, "chat", *ENDLESS]) as terminal:
        terminal.until(b"> ")
        terminal.type(b"hello\n")
        terminal.until(b"hello\r\n")
        for message in (b"again\n", b"\n"):
            terminal.wait()
            terminal.type(CTRL_C)
            terminal.until(b"\r\n> ")
            terminal.type(message)
            terminal.until(b"\r\n")
        terminal.until(b"> ")
        terminal.type(CTRL_C)
        assert terminal.ended() == 130
        assert b"Traceback" not in terminal.rest
        assert b"Fatal" not in terminal.rest


def test_ctrl_d_leaves_a_chat() -> None:
    with started(["chat", *ENDLESS]) as terminal:
        terminal.until(b"> ")
        terminal.type(CTRL_D)
        assert terminal.ended() == 0
        assert terminal.rest == b"\r\n"


@pytest.mark.parametrize(
    ("args", "shown"),
    [
        (["complete", "hello", *ENDLESS], b"0"),
        (["demo", "--max-tokens", "100000"], b"Why is the sky blue?"),
    ],
    ids=["complete", "demo"],
)
def test_ctrl_c_ends_other_commands_with_130(args: list[str], shown: bytes) -> None:
    with started(args) as terminal:
        terminal.until(shown)
        terminal.type(CTRL_C)
        assert terminal.ended() == 130
        assert b"Traceback" not in terminal.rest
