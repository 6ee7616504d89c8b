"""Steps as they would have been recorded, for tests of what is made of them."""

from __future__ import annotations

from typing import Any

from aiosched.observe.records import StepRecord


def step(number: int, began: float, **fields: Any) -> StepRecord:
    """A decode step of 4 s on the device from ``began`` on, with 1 s of host work on each side."""
    defaults: dict[str, Any] = {
        "mode": "decode",
        "sequences": 2,
        "tokens": 2,
        "depth": 0,
        "reason": "depth 0",
        "planning": began - 1.0,
        "planned": began - 0.5,
        "launching": began - 0.5,
        "launched": began,
        "readers_began": began,
        "readers_ended": began + 0.25,
        "device_started": began,
        "device_finished": began + 4.0,
        "landed": began + 4.0,
        "committed": began + 5.0,
        "host_seconds": 2.0,
        "hidden_seconds": 0.5,
        "idle_gap_seconds": 2.0,
    }
    return StepRecord(step=number, **(defaults | fields))
