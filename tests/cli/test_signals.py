"""SIGTERM, and what ends with its parent, without a clock: programs signal themselves."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys

import pytest

from aiosched.bench.readers import ending
from aiosched.commands.running import Terminated, run

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="SIGTERM ends a process there")


def test_sigterm_cancels_the_coroutine_and_raises_when_it_has_cleaned_up():
    done = []

    async def main():
        try:
            signal.raise_signal(signal.SIGTERM)
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            done.append("cleaned up")

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Terminated):
        run(main())
    assert done == ["cleaned up"]
    assert signal.getsignal(signal.SIGTERM) is before


def test_readers_have_ended_after_the_block_however_it_is_left():
    async def main():
        reader = asyncio.create_task(asyncio.Event().wait())
        with pytest.raises(ZeroDivisionError):
            async with ending([reader]):
                raise ZeroDivisionError
        assert reader.cancelled()

    asyncio.run(main())


def program(body: str) -> subprocess.CompletedProcess[str]:
    """The command line with ``body`` in place of its commands."""
    code = (
        "import signal\n"
        "import aiosched.cli, aiosched.cli.app\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"def app(prog_name):\n{body}\n"
        "aiosched.cli.app.app = app\n"
        "aiosched.cli.main()\n"
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_signal_outside_of_a_command_is_an_exit_code_and_no_traceback(name, code):
    done = program(f"    signal.raise_signal(signal.{name})")
    assert (done.returncode, done.stderr.strip()) == (code, "")


CHILD = (
    "from aiosched.bench.orphans import end_with_parent as e; e(); import signal; signal.pause()"
)
PEER = "import time\ndef open_engine(settings):\n    time.sleep(3600)\n"


def test_a_child_ends_when_its_parent_is_gone():
    with subprocess.Popen([sys.executable, "-c", CHILD], stdin=subprocess.PIPE) as child:
        child.stdin.close()  # as the system does for a process that is killed
        assert child.wait(60) == 1


def test_an_engine_under_test_ends_with_its_parent_even_while_it_is_at_work(tmp_path):
    from aiosched.bench.peers.process import CHILD as script

    driver = tmp_path / "driver.py"
    driver.write_text(PEER)
    command = [sys.executable, str(script), str(driver), "{}"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as child:
        child.stdin.close()
        assert child.wait(60) == 1
