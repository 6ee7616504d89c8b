"""may_overlap: every reason not to launch a step before the last result is in, in one place."""

from __future__ import annotations

from enum import StrEnum

from aiosched.scheduler.batch import ScheduleBatch


class NoOverlap(StrEnum):
    """Why a step waited for the result of the one before."""

    DEPTH = "depth 0"
    CONSECUTIVE_PREFILL = "consecutive prefill"


def may_overlap(
    batch: ScheduleBatch,
    last: ScheduleBatch | None,
    *,
    depth: int,
    disable_consecutive_prefill_overlap: bool,
) -> NoOverlap | None:
    """``None`` if ``batch`` may be launched while the result of ``last`` is pending, else why not.

    A function of values that all ranks agree on (``is_extend_in_batch``, never the local mode), so
    that ranks decide alike. ``last`` is ``None`` when no result is pending.
    """
    if last is None:
        return None
    if depth == 0:
        return NoOverlap.DEPTH
    if disable_consecutive_prefill_overlap and batch.is_extend_in_batch and last.is_extend_in_batch:
        return NoOverlap.CONSECUTIVE_PREFILL
    return None
