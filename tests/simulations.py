"""What tests of ``aiosched.simulate`` share: a calibration of round numbers."""

from __future__ import annotations

from typing import Any

import msgspec

from aiosched.simulate.cost import Calibration, Fit, StepCost

_FIT = Fit(steps=100, mean_ms=10.0, error_median=0.01, error_p90=0.02)


def calibration(**changes: Any) -> Calibration:
    """10 ms a step, 1 ms for each prompt token, and a host that takes nothing."""
    made = Calibration(
        model="a model",
        dtype="float32",
        overlap_depth=1,
        kv_tokens=65536,
        max_model_len=4096,
        machine={"cpu": "a processor", "cores": 2},
        versions={"python": "3"},
        settings={},
        device=StepCost(rows=((0, 0.010),), prompt_tokens=((0, 0.0), (1000, 1.0))),
        host=StepCost(rows=((0, 0.0),)),
        device_fit=_FIT,
        host_fit=_FIT,
    )
    return msgspec.structs.replace(made, **changes)
