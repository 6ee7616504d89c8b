"""The command line over a model of integers, in this process."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import pytest
from click.testing import CliRunner, Result
from talking_model import Cli, TalkingModel

from aiosched.cli.app import app
from aiosched.commands.plug import Plug
from aiosched.model.inputs import Model


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cli]:
    """Runs ``aiosched ARGS…``; without a model it is a ``TalkingModel``."""
    for name in list(os.environ):
        if name.startswith("AIOSCHED_") or name == "XDG_CACHE_HOME":
            monkeypatch.delenv(name)
    logger = logging.getLogger("aiosched")
    before = list(logger.handlers), logger.level, logger.propagate

    def invoke(*args: str, input: str = "", model: Model | None = None) -> Result:
        result = CliRunner().invoke(
            app, args, input=input, obj=Plug(model or TalkingModel()), prog_name="aiosched"
        )
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    yield invoke
    logger.handlers, logger.level, logger.propagate = before
