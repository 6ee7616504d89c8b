"""Part ``wake-up``: from the end of device work to the coroutine that awaits it.

A launch that is awaited is held against the same launch when the event loop's thread does nothing
but look whether it is done: the difference is the way from the device through the waiting thread to
the loop. On a CPU the work is a sleep in the worker thread.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from statistics import median
from time import perf_counter
from typing import Any

import torch

from aiosched.bench.gpu.settings import Settings
from aiosched.bench.measure import Spread
from aiosched.device.cpu import CpuDevice
from aiosched.device.stream import Device, InFlight

WORK = 300e-6
"""Seconds of device work: long enough for the waiting thread to be asleep when it ends."""


async def measure(settings: Settings) -> AsyncIterator[dict[str, Any]]:
    """A row for each way to wait: ``waiting wake_up_us low_us high_us looking_us``."""
    for waiting, device in _devices(settings).items():
        device.open(asyncio.get_running_loop())
        try:
            work = _work(settings)
            for _ in range(10):
                await _awaited(device, work)
            looked, awaited = [], []
            for _ in range(settings.repeats):
                looked.append(_looked_at(device, work))
                awaited.append(await _awaited(device, work))
        finally:
            device.close(timeout=10.0)
        shortest = median(looked)
        spread = Spread.of([(seconds - shortest) * 1e6 for seconds in awaited])
        yield {
            "waiting": waiting,
            "wake_up_us": spread.median,
            "low_us": spread.low,
            "high_us": spread.high,
            "looking_us": shortest * 1e6,
        }


def _devices(settings: Settings) -> dict[str, Device]:
    if not settings.on_cuda:
        return {"worker thread": CpuDevice()}
    from aiosched.device.cuda import CudaDevice

    return {
        "blocking": CudaDevice(index=settings.index),
        "spinning": CudaDevice(index=settings.index, spin=True),
    }


def _work(settings: Settings) -> Callable[[], object]:
    """Device work of about ``WORK`` seconds."""
    if not settings.on_cuda:
        return lambda: time.sleep(WORK)
    cycles = int(WORK * 1e9)  # a GPU makes one to two in a nanosecond
    return lambda: torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


async def _awaited(device: Device, work: Callable[[], object]) -> float:
    flight = _launched(device, work)
    began = perf_counter()
    await flight
    return perf_counter() - began


def _looked_at(device: Device, work: Callable[[], object]) -> float:
    flight = _launched(device, work)
    began = perf_counter()
    while not flight.done():
        time.sleep(0)  # lets go of the GIL: on a CPU the worker needs it
    return perf_counter() - began


def _launched(device: Device, work: Callable[[], object]) -> InFlight[object]:
    return device.forward.launch(work, step=0, label="forward")
