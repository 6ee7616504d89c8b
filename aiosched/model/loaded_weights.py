"""Whether a checkpoint held all of the model that transformers made of it.

Parameters that a checkpoint lacks are filled with random numbers there, and a log line says so.
"""

from __future__ import annotations

import logging
from typing import Any

from transformers import PreTrainedModel

from aiosched.errors import ModelLoadError

logger = logging.getLogger(__name__)


def complete(loaded: Any, source: str) -> PreTrainedModel:
    """The model that was loaded, if all of it was in the checkpoint.

    Weights that the model has no place for are logged: they are often those of another head.

    Args:
        loaded: what ``from_pretrained(..., output_loading_info=True)`` returned.
        source: of the weights, for errors.

    Raises:
        ModelLoadError: names parameters that the checkpoint lacks or has in another shape.
    """
    model: PreTrainedModel
    model, info = loaded
    unread = sorted(map(str, (*info["missing_keys"], *info["mismatched_keys"])))
    if unread:
        raise ModelLoadError(
            f"{source} lacks {len(unread)} parameters of {type(model).__name__}: "
            f"{', '.join(unread[:3])}"
        )
    if unknown := sorted(info["unexpected_keys"]):
        logger.warning(
            "%s has %d tensors that %s does not have: %s",
            source, len(unknown), type(model).__name__, ", ".join(unknown[:3]),
        )  # fmt: skip
    return model
