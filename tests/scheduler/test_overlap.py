"""may_overlap: each reason not to overlap, alone; and the switch seen through the engine."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from engines import greedy, small_engine

from aiosched.device.sim import SimDevice
from aiosched.scheduler.batch import ForwardMode
from aiosched.scheduler.overlap import NoOverlap, may_overlap
from aiosched.testing.hash_model import oracle

DECODE, EXTEND, MIXED = ForwardMode.DECODE, ForwardMode.EXTEND, ForwardMode.MIXED
EXTENDS = [EXTEND, MIXED]


def ask(batch, last, depth=1, disabled=False):
    batch, last = (
        None if mode is None else SimpleNamespace(mode=mode, is_extend_in_batch=mode.is_extend)
        for mode in (batch, last)
    )
    return may_overlap(batch, last, depth=depth, disable_consecutive_prefill_overlap=disabled)


@pytest.mark.parametrize("last", [DECODE, EXTEND, MIXED])
@pytest.mark.parametrize("batch", [DECODE, EXTEND, MIXED])
def test_every_pair_of_batches_may_overlap_by_default(batch, last):
    assert ask(batch, last, depth=1) is None
    assert ask(batch, last, depth=2) is None


@pytest.mark.parametrize("batch", [DECODE, EXTEND, MIXED])
def test_at_depth_0_nothing_overlaps(batch):
    assert ask(batch, DECODE, depth=0) is NoOverlap.DEPTH


@pytest.mark.parametrize("depth", [0, 1])
def test_without_a_pending_result_there_is_nothing_to_wait_for(depth):
    assert ask(EXTEND, None, depth=depth, disabled=True) is None


@pytest.mark.parametrize("batch", EXTENDS)
@pytest.mark.parametrize("last", EXTENDS)
def test_two_prefills_in_a_row_do_not_overlap_if_that_is_switched_off(batch, last):
    assert ask(batch, last, disabled=True) is NoOverlap.CONSECUTIVE_PREFILL


@pytest.mark.parametrize(("batch", "last"), [(DECODE, EXTEND), (EXTEND, DECODE), (DECODE, DECODE)])
def test_the_switch_concerns_two_prefills_only(batch, last):
    assert ask(batch, last, disabled=True) is None


def test_the_value_that_all_ranks_agree_on_decides_and_not_the_local_mode():
    def batch(mode, agreed):
        return SimpleNamespace(mode=mode, is_extend_in_batch=agreed)

    def reason(batch, last):
        return may_overlap(batch, last, depth=1, disable_consecutive_prefill_overlap=True)

    elsewhere = batch(DECODE, True)  # this rank decodes while another reads prompts
    assert reason(elsewhere, elsewhere) is NoOverlap.CONSECUTIVE_PREFILL
    assert reason(batch(EXTEND, False), batch(EXTEND, False)) is None


PROMPT = [(7 * i) % 64 for i in range(96)]


async def two_prompts_in_chunks(**settings):
    """Two prompts of six chunks each, then four decodes. The engine's statistics."""
    async with small_engine(prefill_chunk_tokens=16, prefix_cache=False, **settings) as engine:
        answers = await asyncio.gather(*(engine.complete(PROMPT, greedy(5)) for _ in range(2)))
        assert all(list(a.token_ids) == oracle(PROMPT, 5) for a in answers)
        return engine.stats()


@pytest.mark.parametrize("depth", [1, 2])
def test_with_the_switch_each_prefill_waits_for_the_one_before(vrun, depth):
    stats = vrun(
        two_prompts_in_chunks(overlap_depth=depth, disable_consecutive_prefill_overlap=True)
    )
    assert stats.not_overlapped == {"consecutive prefill": 11}  # of 12 chunks all but the first


@pytest.mark.parametrize("depth", [1, 2])
def test_a_step_that_waits_for_several_results_counts_once(vrun, depth):
    """Decode steps are in flight too when the chunks of a second prompt wait for one another."""

    async def main():
        settings = {"overlap_depth": depth, "disable_consecutive_prefill_overlap": True}
        async with small_engine(prefill_chunk_tokens=16, **settings) as engine:
            first = engine.generate(PROMPT[:8], greedy(30))
            for _ in range(4):
                await anext(first)
            await engine.complete(PROMPT, greedy(2))
            return engine.stats()

    assert vrun(main()).not_overlapped == {"consecutive prefill": 5}


@pytest.mark.parametrize("depth", [1, 2])
def test_without_the_switch_every_step_overlaps(vrun, depth):
    assert vrun(two_prompts_in_chunks(overlap_depth=depth)).not_overlapped == {}


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("switch", [False, True])
def test_the_device_sees_the_second_prefill_before_or_after_the_first_result(vrun, depth, switch):
    """The launch of chunk 2 comes while chunk 1 is behind its gate, or not before it opens."""
    device = SimDevice()
    settings = {"overlap_depth": depth, "disable_consecutive_prefill_overlap": switch}

    async def main():
        async with small_engine(device=device, prefill_chunk_tokens=16, **settings) as engine:
            device.hold(step=1, label="copy")
            answer = asyncio.ensure_future(engine.complete(PROMPT, greedy(2)))
            await device.reached(1, "copy")
            for _ in range(20):
                await asyncio.sleep(0)
            launched = {record.step for record in device.trace if record.kind == "launch"}
            assert (2 in launched) is not switch
            device.release()
            assert list((await answer).token_ids) == oracle(PROMPT, 2)

    vrun(main())
