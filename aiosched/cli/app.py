"""The ``aiosched`` group: its help, its global options, and how every command ends."""

from __future__ import annotations

import errno
from typing import Any, Literal

import click

from aiosched import __version__
from aiosched.cli.bench import bench
from aiosched.cli.chat import chat
from aiosched.cli.complete import complete
from aiosched.cli.demo import demo
from aiosched.cli.simulate import simulate
from aiosched.cli.timeline import timeline
from aiosched.commands.plug import Plug
from aiosched.commands.running import INTERRUPTED, TERMINATED, Terminated
from aiosched.errors import AioschedError, InvalidConfig, InvalidRequest
from aiosched.simulate.trace import InvalidTrace


class App(click.Group):
    """A group whose commands end with one line and an exit code, whatever stops them.

    130 after Ctrl-C, 143 after SIGTERM, 2 for what the user can correct on the command line, 1 for
    the rest.
    """

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (InvalidRequest, InvalidConfig, InvalidTrace) as error:
            raise _WrongUse(_one_line(error)) from error
        except AioschedError as error:
            raise click.ClickException(_one_line(error)) from error
        except OSError as error:
            if error.errno == errno.EPIPE:  # `| head`: click ends quietly
                raise
            raise click.ClickException(_one_line(error)) from error
        except Terminated:
            raise click.exceptions.Exit(TERMINATED) from None
        except KeyboardInterrupt:
            click.echo(err=True)
            raise click.exceptions.Exit(INTERRUPTED) from None


class _WrongUse(click.ClickException):
    exit_code = 2


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


@click.group(cls=App, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="aiosched")
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"], case_sensitive=False),
    help="Write the engine's logs to standard error, from this level on.  [default: no logs]",
)
@click.option(
    "--log-format",
    type=click.Choice(["console", "json"]),
    help="How logs look; given alone it means --log-level info.  [default: console]",
)
@click.pass_context
def app(
    ctx: click.Context, log_level: str | None, log_format: Literal["console", "json"] | None
) -> None:
    """Run language models on an asyncio engine that overlaps device and host work.

    The model is fetched at first use and kept; without --model it is a small one that runs on any
    machine. Settings come from flags, then AIOSCHED_* variables, then --config FILE.toml.

    \b
    Examples:
      aiosched demo                                     see it work, and what the overlap does
      aiosched complete "Why is the sky blue?"          one answer, streamed
      aiosched chat --system "Answer in one sentence."  a conversation

    `aiosched COMMAND --help` says more about each.
    """
    ctx.ensure_object(Plug)
    if log_level or log_format:
        from aiosched.observe.logs import configure

        configure(log_format or "console", (log_level or "info").upper())


app.add_command(complete)
app.add_command(chat)
app.add_command(demo)
app.add_command(bench)
app.add_command(simulate)
app.add_command(timeline)
