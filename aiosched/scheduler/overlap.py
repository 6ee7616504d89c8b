"""may_overlap: every reason not to launch a step before the last result is in, in one place."""

from __future__ import annotations

from enum import StrEnum

from aiosched.scheduler.batch import ScheduleBatch


class NoOverlap(StrEnum):
    """Why a step did not overlap with the one before, or the next one with it."""

    DEPTH = "depth 0"
    CONSECUTIVE_PREFILL = "consecutive prefill"
    FIRST_TOKEN = "first token due"  # depth "auto": nothing else can run
    SLOWER = "overlap measures slower"  # depth "auto" on a CPU


def may_overlap(
    batch: ScheduleBatch,
    last: ScheduleBatch | None,
    *,
    depth: int,
    zero: NoOverlap = NoOverlap.DEPTH,
    disable_consecutive_prefill_overlap: bool,
) -> NoOverlap | None:
    """``None`` if ``batch`` may be launched while the result of ``last`` is pending, else why not.

    A function of values that all ranks agree on (``is_extend_in_batch``, never the local mode), so
    that ranks decide alike. ``last`` is ``None`` when no result is pending.

    Args:
        depth: results that may be pending behind ``batch``.
        zero: why, if that is 0.
    """
    if last is None:
        return None
    # A first token that is due asks that nothing comes between it and its reader. The chunks of its
    # own prompt before it do not: the device may as well go straight on.
    if depth == 0 and zero is not NoOverlap.FIRST_TOKEN:
        return zero
    if disable_consecutive_prefill_overlap and batch.is_extend_in_batch and last.is_extend_in_batch:
        return NoOverlap.CONSECUTIVE_PREFILL
    return None
