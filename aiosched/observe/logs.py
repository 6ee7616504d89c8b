"""Structured logs that leave the program's own logging alone.

The library logs through ``logging.getLogger("aiosched…")`` with structlog's key-value events, and
configures nothing: what becomes of them is the program's choice. ``configure`` is for programs that
are ours, the command line.
"""

from __future__ import annotations

import logging
import sys
from typing import Any, Literal

import structlog

logging.getLogger("aiosched").addHandler(logging.NullHandler())


def get_logger(name: str) -> Any:
    """A structlog logger over the standard logger ``name``, whatever structlog's own set-up."""
    return structlog.wrap_logger(
        logging.getLogger(name),
        wrapper_class=structlog.stdlib.BoundLogger,
        processors=[
            structlog.stdlib.filter_by_level,
            structlog.stdlib.render_to_log_kwargs,
        ],
    )


def configure(form: Literal["console", "json"], level: str = "INFO") -> None:
    """Write aiosched's logs to standard error. For programs, never called by the library."""
    renderer: Any = (
        structlog.processors.JSONRenderer()
        if form == "json"
        else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            processors=[
                structlog.stdlib.ExtraAdder(),
                structlog.stdlib.add_log_level,
                structlog.stdlib.add_logger_name,
                structlog.processors.TimeStamper(fmt="iso", utc=True),
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                renderer,
            ]
        )
    )
    logger = logging.getLogger("aiosched")
    logger.addHandler(handler)
    logger.setLevel(level)
    logger.propagate = False
