"""MeasuredDevice: what it says of steps whose times are known."""

from __future__ import annotations

import asyncio

import pytest
from engines import greedy, small_engine

from aiosched.device.sim import SimDevice
from aiosched.simulate.measured import MeasuredDevice


def measured(vrun, depth, answers=1, tokens=6):
    """The steps of some answers on a device whose forward takes 10 ms and whose copy 5."""

    async def main():
        device = MeasuredDevice(SimDevice(forward_time=0.010, copy_time=0.005))
        async with small_engine(device=device, overlap_depth=depth) as engine:
            await asyncio.gather(
                *(engine.complete([1, 2, 3 + n], greedy(tokens)) for n in range(answers))
            )
        return device.take()

    return vrun(main())


def test_each_step_is_kept_with_its_shape_and_its_time(vrun):
    steps = measured(vrun, depth=0)
    assert [step.shape.decode_rows for step in steps] == [0, 1, 1, 1, 1, 1]
    assert [step.shape.decode_kv for step in steps] == [0, 4, 5, 6, 7, 8]
    assert [step.device for step in steps] == pytest.approx([0.015] * 6)


def test_with_overlap_a_step_begins_where_the_one_before_landed(vrun):
    steps = measured(vrun, depth=1)
    assert [step.device for step in steps] == pytest.approx([0.015] + [0.010] * 5)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_the_host_takes_no_virtual_time_between_a_result_and_the_next_launch(vrun, depth):
    steps = measured(vrun, depth)
    assert {step.host for step in steps} <= {0.0, None}
    # Behind the last results nothing was launched any more.
    assert [step.host for step in steps].count(None) == depth + 1


def test_steps_are_given_out_once(vrun):
    async def main():
        device = MeasuredDevice(SimDevice(forward_time=0.010))
        async with small_engine(device=device) as engine:
            await engine.complete([1, 2, 3], greedy(4))
            first = device.take()
            await engine.complete([4, 5, 6], greedy(4))
            return first, device.take()

    first, second = vrun(main())
    assert len(first) == len(second) == 4
    assert second[0].shape.prefill_tokens == 3
