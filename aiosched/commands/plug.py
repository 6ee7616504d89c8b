"""How commands come to an engine, and the seam where tests put in a model of their own."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from aiosched.config import EngineConfig
    from aiosched.engine import Engine
    from aiosched.model.inputs import Model
    from aiosched.model.progress import Progress


@dataclass(frozen=True)
class Plug:
    """A model in place of the one that the settings name; ``None``: that one."""

    model: Model | None = None

    @asynccontextmanager
    async def opened(self, config: EngineConfig, *, plain: bool = False) -> AsyncIterator[Engine]:
        """An open engine; on a terminal, progress bars show what it loads.

        ``plain``: without a terminal, write a line for each stage of loading instead.
        """
        from aiosched.engine import Engine

        async with AsyncExitStack() as stack:
            with _shown_loading(plain) as progress:
                engine = Engine(self.model, config=config, progress=progress)
                await stack.enter_async_context(engine)
            yield engine


pass_plug = click.make_pass_decorator(Plug, ensure=True)


@contextmanager
def _shown_loading(plain: bool) -> Iterator[Progress]:
    from aiosched.commands.display import loading_bars, loading_lines

    terminal = sys.stderr.isatty()
    if not terminal and not plain:
        yield lambda stage, done, total: None
        return
    shown = loading_bars if terminal else loading_lines
    with shown() as progress:
        yield progress
