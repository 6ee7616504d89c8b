from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from talking_model import Cli, TalkingModel

import aiosched
import aiosched.cli
from aiosched.cli.app import app
from aiosched.commands.plug import Plug
from aiosched.model.inputs import Model


def test_the_help_says_what_it_is_and_shows_three_examples(cli: Cli) -> None:
    said = cli("--help").output
    assert "asyncio engine" in said
    assert [c for c in ("demo", "complete", "chat") if f"\n    aiosched {c}" in said] == [
        "demo",
        "complete",
        "chat",
    ]


@pytest.mark.parametrize("command", ["complete", "chat", "demo"])
def test_every_command_has_a_help(cli: Cli, command: str) -> None:
    result = cli(command, "-h")
    assert result.exit_code == 0
    for flag in ("--model", "--device", "--dtype", "--max-tokens", "--config"):
        assert flag in result.output


def test_the_version_is_that_of_the_library(cli: Cli) -> None:
    assert cli("--version").output == f"aiosched, version {aiosched.__version__}\n"


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["complete", "x", "--top-p", "3"], "top_p=3.0: must be a number in (0, 1]"),
        (["complete", "x", "--device", "tpu"], "device='tpu': must be auto, cpu, cuda or cuda:N"),
        (["complete", ""], "prompt='': must be text"),
        (["complete", "x" * 5000], "must be at most 4095 tokens"),
        (["complete", "x", "--config", "no.toml"], "'no.toml' does not exist"),
        (["complete"], "Missing argument 'PROMPT'"),
        (["demo", "--depth", "0"], "0 is not in the range"),
        (["listen"], "No such command 'listen'"),
    ],
)
def test_wrong_use_is_one_line_and_code_2(cli: Cli, args: list[str], said: str) -> None:
    result = cli(*args)
    assert result.exit_code == 2
    assert result.stdout == ""
    error = result.stderr.splitlines()[-1]
    assert error.startswith("Error: ")
    assert said in error
    assert "Traceback" not in result.stderr


def test_a_failure_is_one_line_and_code_1(cli: Cli) -> None:
    result = cli("complete", "hello", "--no-chat", model=TalkingModel(faulty=ord("o") % 64))
    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith("Error: request ")
    assert "logits that are not numbers" in line


def test_logs_are_off_unless_asked_for_and_json_is_a_line_each(cli: Cli) -> None:
    assert cli("complete", "x", "--max-tokens", "1").stderr == ""
    logged = cli("--log-format", "json", "complete", "x", "--max-tokens", "1").stderr
    assert json.loads(logged.splitlines()[0])["event"] == "engine open"


def test_loading_is_shown_and_follows_the_settings(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}

    def load_model(name: str, *, progress: Callable[[str, int, int], None], **how: Any) -> Model:
        asked.update(how, name=name)
        progress("unpack weights", 1, 272)
        return TalkingModel()

    loader = SimpleNamespace(load_model=load_model)
    monkeypatch.setitem(sys.modules, "aiosched.model.loader", loader)
    flags = ("--model", "some", "--device", "cpu", "--cache-dir", "/models")
    result = CliRunner().invoke(app, ["demo", "--max-tokens", "2", "--rounds", "1", *flags])
    assert result.stderr == "load libraries …\nunpack weights …\n"
    assert asked == {
        "name": "some",
        "dtype": "float32",
        "device": "cpu",
        "cache_dir": "/models",
        "quantization": "none",
        "compile": False,
    }


def test_missing_packages_are_named_with_the_way_to_get_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = ("rich", "uvloop")
    monkeypatch.setattr(
        aiosched.cli, "find_spec", lambda name: None if name in gone else find_spec(name)
    )
    with pytest.raises(SystemExit) as ended:
        aiosched.cli.main()
    assert ended.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        "Error: the command line needs rich, uvloop: pip install 'aiosched-engine[cli]'"
    )
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(SystemExit):
        aiosched.cli.main()
    assert "needs rich:" in capsys.readouterr().err


def test_the_help_loads_nothing_heavy() -> None:
    program = (
        "import sys\n"
        "from aiosched.cli import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "print([m for m in ('torch', 'transformers', 'jinja2', 'rich.live', 'uvloop')"
        " if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "--help"], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"


TALK = Path(__file__).with_name("talk.py")


@pytest.mark.skipif(sys.platform == "win32", reason="a POSIX shell closes the streams")
def test_closed_standard_streams_are_no_trouble() -> None:
    program = (
        "import asyncio, sys, uvloop\n"
        "import aiosched.cli, aiosched.cli.app\n"
        "def app(prog_name):\n"
        "    uvloop.run(asyncio.sleep(0))\n"
        "    print('unheard')\n"
        "    sys.exit(repr(sys.stdin.read()))\n"
        "aiosched.cli.app.app = app\n"
        "aiosched.cli.main()\n"
    )
    closing = 'exec "$0" "$@" <&- >&-'
    done = subprocess.run(
        ["sh", "-c", closing, sys.executable, "-c", program], stderr=subprocess.PIPE, text=True
    )
    assert (done.returncode, done.stderr) == (1, "''\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is full")
def test_output_that_cannot_be_written_is_one_line_and_code_1() -> None:
    args = [sys.executable, str(TALK), "complete", "hello", "--max-tokens", "2"]
    with open("/dev/full", "w") as full:
        env = {**os.environ, "PYTHONPATH": str(TALK.parents[1])}
        done = subprocess.run(args, stdout=full, stderr=subprocess.PIPE, text=True, env=env)
    assert done.returncode == 1
    assert done.stderr.startswith("Error: [Errno 28]")
    assert "Traceback" not in done.stderr


def test_standard_input_that_is_no_text_is_one_line_and_code_1() -> None:
    result = CliRunner().invoke(app, ["complete", "-"], input=b"caf\xe9", obj=Plug(TalkingModel()))
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: standard input is no text: 'utf-8' codec")
