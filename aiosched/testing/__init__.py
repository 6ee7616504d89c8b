"""Tools for testing programs that use aiosched, and aiosched itself. See docs/testing.md."""

from __future__ import annotations

from aiosched.device.happens_before import RaceError
from aiosched.device.sim import SimDevice
from aiosched.testing.cancel import cancel_at, count_suspensions
from aiosched.testing.clock import Deadlock, VirtualClock
from aiosched.testing.hash_model import HashModel, oracle, oracle_logits

__all__ = [
    "Deadlock",
    "HashModel",
    "RaceError",
    "SimDevice",
    "VirtualClock",
    "cancel_at",
    "count_suspensions",
    "oracle",
    "oracle_logits",
]
