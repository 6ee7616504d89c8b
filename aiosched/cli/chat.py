"""``aiosched chat``: a conversation in the terminal, or with lines from a pipe."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Any, TextIO

import click

from aiosched._threads import in_thread
from aiosched.commands.options import (
    engine_config,
    engine_options,
    overlap_option,
    sampling_options,
    sampling_params,
)
from aiosched.commands.plug import Plug, pass_plug
from aiosched.commands.running import on_interrupt, run
from aiosched.config import EngineConfig
from aiosched.errors import InvalidConfig, InvalidRequest, PromptTooLong, RequestFailed

if TYPE_CHECKING:
    from aiosched.engine import Engine
    from aiosched.params import SamplingParams
    from aiosched.stream import TokenStream

HELP = """\
/reset  forget the conversation (the system prompt stays)
/help   this list
/quit   leave; so does the end of input (Ctrl-D)
Ctrl-C  stop an answer that is being written; at the prompt: leave"""


@click.command(short_help="Talk with a model.")
@click.option("--system", metavar="TEXT", help="What the model is told before the conversation.")
@sampling_options
@engine_options
@overlap_option
@pass_plug
def chat(plug: Plug, /, system: str | None, **flags: Any) -> None:
    """Talk with an instruct model; answers are streamed, and it remembers what was said.

    Ctrl-C stops an answer, and what was written of it stays in the conversation. At the prompt
    Ctrl-C or Ctrl-D leaves. /help lists the commands. With standard input from a pipe each line is
    a message, and only the answers are written.
    """
    config, params = engine_config(flags), sampling_params(flags)
    if run(_chat(plug, config, params, system)):
        raise KeyboardInterrupt


async def _chat(
    plug: Plug, config: EngineConfig, params: SamplingParams, system: str | None
) -> bool:
    """Whether Ctrl-C ended it."""
    async with plug.opened(config) as engine:
        if engine.tokenizer is None or engine.tokenizer.chat_template is None:
            raise InvalidConfig("model", config.model, "one with a chat template, to chat with it")
        conversation = Chat(engine, params, system)
        with on_interrupt(conversation.interrupt):
            return await conversation.run()


class Chat:
    """A conversation: reads lines, streams answers, keeps the history.

    ``history`` holds messages (``role`` and ``content``), the system prompt first.
    """

    def __init__(
        self,
        engine: Engine,
        params: SamplingParams,
        system: str | None = None,
        lines: TextIO | None = None,
    ) -> None:
        self._engine = engine
        self._params = params
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self.history = list(self._system)
        self._lines = _own_stdin() if lines is None else lines
        self._interactive = self._lines.isatty()
        self._answer: TokenStream | None = None
        self._left = asyncio.get_running_loop().create_future()

    async def run(self) -> bool:
        """Until the input ends, ``/quit`` (False), or Ctrl-C at the prompt (True)."""
        if self._interactive:
            click.echo("Type a message; /help lists the commands.")
        while (line := await self._next_line()) is not None:
            match line.strip():
                case "":
                    continue
                case "/quit":
                    break
                case "/reset":
                    self.history = list(self._system)
                case "/help":
                    click.echo(HELP)
                case command if command.startswith("/") and command[1:].isalpha():
                    click.echo(f"There is no command {command}; /help lists them.", err=True)
                case message:
                    await self.answer(message)
        return self._left.done()

    def interrupt(self) -> None:
        """Ctrl-C: stop the answer that is being written, or leave."""
        if self._answer is not None:
            self._answer.abort()
        elif not self._left.done():
            self._left.set_result(None)

    async def answer(self, message: str) -> None:
        """Stream the answer to ``message``, and add both to the history.

        A message that got no answer at all is left out: a second try should not follow it.
        """
        asked = [*self.history, {"role": "user", "content": message}]
        said: list[str] = []
        try:
            await self._stream(asked, said)
        except PromptTooLong as error:
            click.echo(f"Error: {error}. /reset begins anew.", err=True)
        except (InvalidRequest, RequestFailed) as error:
            click.echo(f"Error: {' '.join(str(error).split())}", err=True)
        if any(said):
            self.history = [*asked, {"role": "assistant", "content": "".join(said)}]

    async def _stream(self, asked: list[dict[str, str]], said: list[str]) -> None:
        async with self._engine.generate(asked, self._params) as stream:
            self._answer = stream
            try:
                async for token in stream:
                    said.append(token.text)
                    click.echo(token.text, nl=False)
            finally:
                self._answer = None
                click.echo()

    async def _next_line(self) -> str | None:
        """A line of input, read in a thread; ``None`` at its end, or when Ctrl-C came."""
        if self._interactive:
            click.echo("> ", nl=False)
        reading = asyncio.ensure_future(in_thread(self._lines.readline, "aiosched-stdin"))
        try:
            await asyncio.wait({reading, self._left}, return_when=asyncio.FIRST_COMPLETED)
            line = reading.result() if reading.done() else ""
        finally:
            reading.cancel()
            await asyncio.wait({reading})
        if not line and self._interactive and not self._left.done():
            click.echo()  # Ctrl-D leaves the cursor behind the prompt
        return line or None


def _own_stdin() -> TextIO:
    """Standard input through a reader of its own.

    A thread that still waits for a line when the program ends holds its reader's lock, and Python
    dies on the way out if that is the lock of ``sys.stdin``.
    """
    try:
        descriptor = sys.stdin.fileno()
    except (OSError, AttributeError):  # something else was put in its place
        return sys.stdin
    return open(descriptor, encoding=sys.stdin.encoding, errors="replace", closefd=False)
