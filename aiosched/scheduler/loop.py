"""The two loops. Everything that they call is in ``core.py``, one short method each.

normal      device ▕ N ▏          ▕ N+1 ▏          what a step costs: device + host
            host         ▕ commit ▏       ▕ commit

overlap     device ▕ N ▏▕ N+1 ▏▕ N+2 ▏             what a step costs: max(device, host)
            host   ▕N-1▏▕  N  ▏▕ N+1 ▏
"""

from __future__ import annotations

from collections import deque

from aiosched.scheduler.batch import ScheduleBatch
from aiosched.scheduler.core import EngineCore


async def event_loop_normal(core: EngineCore) -> None:
    """One step after another: the device waits while the host works, and the other way round."""
    while True:
        core.intake()
        batch = core.plan()
        if batch is None:
            await core.idle()
            continue
        core.launch(batch)
        await core.commit(batch)


async def event_loop_overlap(core: EngineCore) -> None:
    """Process the result of step N-1 while the device runs step N; ``core.depth`` may be more.

    It may also change from batch to batch, and be 0.
    """
    results: deque[ScheduleBatch] = deque()  # launched, not committed yet; oldest first
    while True:
        core.intake()
        batch = core.plan()  # without the results that are pending
        if batch is None and not results:
            await core.idle()
            continue
        if batch is not None:
            while results and not core.may_overlap(batch, results[-1]):
                await core.commit(results.popleft())
            core.launch(batch)  # returns once it is enqueued
            results.append(batch)
        # With nothing to launch, or a full pipeline, wait for the oldest result. The device is
        # busy with the others meanwhile.
        if batch is None:
            await core.commit(results.popleft())
        while len(results) > core.depth:
            await core.commit(results.popleft())
