"""Silence for libraries that print while they load."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from huggingface_hub import utils as hub_utils
from transformers.utils import logging as transformers_utils_logging

# Neither library annotates its switches.
hub: Any = hub_utils
transformers_logging: Any = transformers_utils_logging


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """No progress bars and no log lines below error from transformers and the Hub client inside;
    afterwards their settings are what they were."""
    verbosity = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    hub_bars = not hub.are_progress_bars_disabled()
    hub_verbosity = hub.logging.get_verbosity()
    hub.logging.set_verbosity_error()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    if hub_bars:
        hub.disable_progress_bars()
    try:
        yield
    finally:
        hub.logging.set_verbosity(hub_verbosity)
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()
        # transformers' switch moves the Hub's along, so the Hub's own setting comes last.
        if hub_bars:
            hub.enable_progress_bars()
        else:
            hub.disable_progress_bars()
