"""Flags that commands share, and how flags, environment and file become settings.

A flag that names a field of ``EngineConfig`` or ``SamplingParams`` carries the field's name, and
``None`` when it was not given, so that the defaults stand in one place: the library.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

import click
import msgspec

from aiosched.config import DEVICES, DTYPES, EngineConfig
from aiosched.params import SamplingParams

Command = TypeVar("Command", bound=Callable[..., Any])

TEMPERATURE = 0.7
MAX_TOKENS = 512


def as_depth(
    ctx: click.Context, param: click.Parameter, value: str | None
) -> int | Literal["auto"] | None:
    """``auto``, or a number; what numbers there may be is the setting's own business."""
    if value is None or value == "auto":
        return value  # type: ignore[return-value]
    try:
        return int(value)
    except ValueError:
        raise click.BadParameter(f"{value!r} is neither a number nor 'auto'.") from None


def engine_options(command: Command) -> Command:
    """``--config``, and the settings of an engine that one changes most."""
    return _decorated(
        command,
        click.option(
            "--config",
            "config_file",
            type=click.Path(exists=True, dir_okay=False, path_type=Path),
            help="TOML file with fields of EngineConfig.",
        ),
        click.option("--model", help="Built-in name, Hub id, folder, .gguf file or dummy: shape."),
        click.option("--device", metavar="DEVICE", help=f"{', '.join(DEVICES)} or cuda:N."),
        click.option("--dtype", metavar="DTYPE", help=f"Of weights and KV: {', '.join(DTYPES)}."),
        click.option("--max-model-len", type=int, help="Longest prompt and answer, in tokens."),
        click.option("--kv-tokens", type=int, help="Tokens that the KV cache holds."),
        click.option("--compute-threads", type=int, help="Threads of CPU device work."),
        click.option("--cache-dir", help="Where fetched models are kept."),
    )


def overlap_option(command: Command) -> Command:
    return _decorated(
        command,
        click.option(
            "--overlap-depth",
            callback=as_depth,
            metavar="DEPTH",
            help="0: normal loop, 1: overlap, more: run ahead; auto: chosen for each batch.",
        ),
    )


def sampling_options(command: Command) -> Command:
    """How answers are sampled and when they end."""
    return _decorated(
        command,
        click.option(
            "--max-tokens",
            type=int,
            default=MAX_TOKENS,
            show_default=True,
            help="Most tokens of an answer.",
        ),
        click.option(
            "--temperature",
            type=float,
            default=TEMPERATURE,
            show_default=True,
            help="0 always takes the likeliest token.",
        ),
        click.option("--top-p", type=float, help="Keep the likeliest tokens up to this sum."),
        click.option("--top-k", type=int, help="Keep this many likeliest tokens."),
        click.option("--min-p", type=float, help="Keep tokens this likely, next to the likeliest."),
        click.option("--repetition-penalty", type=float, help="Above 1: fewer repetitions."),
        click.option("--seed", type=int, help="Same seed, same answer."),
        click.option("--stop", multiple=True, help="Text that ends the answer; repeatable."),
    )


def engine_config(
    flags: Mapping[str, Any], environ: Mapping[str, str] = os.environ
) -> EngineConfig:
    """Settings from ``flags``, then the environment, then the file of ``--config``.

    Raises:
        InvalidConfig: a setting is unknown or cannot be used.
    """
    given = _given(flags, EngineConfig)
    path = flags.get("config_file")
    if path is None:
        return EngineConfig.from_env(environ, **given)
    config = EngineConfig.from_file(path, **(EngineConfig.values_from_env(environ) | given))
    if config.cache_dir is None:
        default = EngineConfig.from_env(
            {name: environ[name] for name in ("XDG_CACHE_HOME",) if name in environ}
        )
        config = msgspec.structs.replace(config, cache_dir=default.cache_dir)
    return config


def sampling_params(flags: Mapping[str, Any]) -> SamplingParams:
    """Parameters from ``flags``.

    Raises:
        InvalidRequest: one is out of its bounds.
    """
    return SamplingParams(**_given(flags, SamplingParams))


def _given(flags: Mapping[str, Any], settings: type[msgspec.Struct]) -> dict[str, Any]:
    fields = settings.__struct_fields__
    return {name: flags[name] for name in fields if flags.get(name) is not None}


def _decorated(command: Command, *options: Callable[[Command], Command]) -> Command:
    for option in reversed(options):
        command = option(command)
    return command
