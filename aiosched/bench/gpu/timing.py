"""Time of device work: by CUDA events on a GPU, by the clock on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import perf_counter

import torch


def seconds_per_call(
    call: Callable[[], object], device: str, *, calls: int, rounds: int = 5
) -> float:
    """Median over ``rounds`` of the mean over ``calls`` calls in a row, after three to warm up.

    On CUDA the calls enqueue on the current stream, and the time is the device's.
    """
    for _ in range(3):
        call()
    synchronize(device)
    return median(_one_round(call, device, calls) / calls for _ in range(rounds))


def synchronize(device: str) -> None:
    """Until the device has done all that was enqueued."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def _one_round(call: Callable[[], object], device: str, calls: int) -> float:
    if not device.startswith("cuda"):
        began = perf_counter()
        for _ in range(calls):
            call()
        return perf_counter() - began
    with torch.cuda.device(device):
        begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        begin.record()
        for _ in range(calls):
            call()
        end.record()
        end.synchronize()
    milliseconds: float = begin.elapsed_time(end)
    return milliseconds / 1e3
