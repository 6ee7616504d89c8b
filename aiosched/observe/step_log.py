"""Steps in the log: each one at debug level, and a summary at info level."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from aiosched.observe.logs import get_logger
from aiosched.observe.records import StepRecord
from aiosched.observe.stats import StepTimes

SUMMARY_SECONDS = 10.0
"""Work between two summaries: an engine that has nothing to do says nothing."""

_NAME = "aiosched.steps"
_logger = logging.getLogger(_NAME)
_log = get_logger(_NAME)


class StepLog:
    """Writes steps to the logger ``aiosched.steps``.

    Attributes:
        due: seconds of work (device time and idle gaps) at which the next summary is due.
    """

    def __init__(self) -> None:
        self.due = SUMMARY_SECONDS
        self._steps = 0
        self._tokens = 0
        self._worked = 0.0
        self._not_overlapped: Mapping[str, int] = {}

    @property
    def wants_steps(self) -> bool:
        """Whether single steps are logged. The standard library remembers the answer."""
        return _logger.isEnabledFor(logging.DEBUG)

    def step(self, record: StepRecord) -> None:
        if not self.wants_steps:
            return
        _log.debug(
            "step",
            step=record.step,
            mode=record.mode,
            sequences=record.sequences,
            tokens=record.tokens,
            depth=record.depth,
            device_ms=_ms(record.device_seconds),
            host_ms=_ms(record.host_seconds),
            idle_gap_ms=_ms(record.idle_gap_seconds),
            overlap_ratio=round(record.overlap_ratio, 3),
            reason=record.reason,
        )

    def summary(
        self,
        steps: int,
        tokens: int,
        worked: float,
        recent: StepTimes,
        not_overlapped: Mapping[str, int],
    ) -> None:
        """Log what the engine did since the last summary. The arguments are sums from its start,
        but for ``recent``, whose averages are logged as they are."""
        if _logger.isEnabledFor(logging.INFO):
            before = self._not_overlapped
            reasons = {
                reason: more
                for reason, count in not_overlapped.items()
                if (more := count - before.get(reason, 0))
            }
            _log.info(
                "steps",
                steps=steps - self._steps,
                tokens=tokens - self._tokens,
                tokens_per_second=round((tokens - self._tokens) / (worked - self._worked), 1),
                device_ms=round(recent.device_ms, 3),
                host_ms=round(recent.host_ms, 3),
                idle_gap_ms=round(recent.idle_gap_ms, 3),
                overlap_ratio=round(recent.overlap_ratio, 3),
                not_overlapped=reasons,
            )
        self.due = worked + SUMMARY_SECONDS
        self._steps, self._tokens, self._worked = steps, tokens, worked
        self._not_overlapped = dict(not_overlapped)


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 3)
