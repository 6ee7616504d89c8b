"""``aiosched complete``: one prompt, its answer on standard output."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click
import msgspec

from aiosched.commands.options import (
    engine_config,
    engine_options,
    overlap_option,
    sampling_options,
    sampling_params,
)
from aiosched.commands.plug import Plug, pass_plug
from aiosched.commands.running import run

if TYPE_CHECKING:
    from aiosched.config import EngineConfig
    from aiosched.engine import Engine
    from aiosched.params import SamplingParams
    from aiosched.prompts import Prompt


@click.command(short_help="Answer one prompt.")
@click.argument("prompt")
@click.option(
    "--chat/--no-chat",
    default=None,
    help="Put the prompt into the model's chat template, or not.  [default: if it has one]",
)
@click.option("--n", type=int, help="Number of answers.")
@click.option("--json", "as_json", is_flag=True, help="Print the completion as one JSON object.")
@sampling_options
@engine_options
@overlap_option
@pass_plug
def complete(plug: Plug, /, prompt: str, chat: bool | None, as_json: bool, **flags: Any) -> None:
    """Answer PROMPT, or what standard input holds if PROMPT is "-".

    The answer is streamed as it is generated; several (--n) are printed when all have ended.

    \b
    Examples:
      aiosched complete "Why is the sky blue?" --temperature 0
      aiosched complete - --max-tokens 100 < question.txt
      aiosched complete "Once upon a time" --no-chat --n 3 --json
    """
    config, params = engine_config(flags), sampling_params(flags)
    if prompt == "-":
        try:
            prompt = sys.stdin.read().rstrip("\n")
        except UnicodeDecodeError as error:
            raise click.ClickException(f"standard input is no text: {error}") from error
    run(_complete(plug, config, prompt, params, chat, as_json))


async def _complete(
    plug: Plug,
    config: EngineConfig,
    text: str,
    params: SamplingParams,
    chat: bool | None,
    as_json: bool,
) -> None:
    async with plug.opened(config) as engine:
        prompt = as_prompt(engine, text, chat)
        if as_json:
            completion = await engine.complete(prompt, params)
            click.echo(msgspec.json.encode(completion))
        elif params.n > 1:
            completion = await engine.complete(prompt, params)
            for choice in completion.choices:
                click.echo(f"--- {choice.index + 1} of {params.n} ---\n{choice.text}")
        else:
            async with engine.generate(prompt, params) as stream:
                async for token in stream:
                    click.echo(token.text, nl=False)
            click.echo()


def as_prompt(engine: Engine, text: str, chat: bool | None = None) -> Prompt:
    """``text`` as a user's message if the model has a chat template, or as ``chat`` says."""
    if chat is None:
        chat = engine.tokenizer is not None and engine.tokenizer.chat_template is not None
    return [{"role": "user", "content": text}] if chat and text else text
