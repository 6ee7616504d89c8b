"""The depth that "auto" chooses, by what it has seen; no engine, no time but what the test says."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from aiosched.scheduler.batch import ForwardMode
from aiosched.scheduler.depth import (
    HOLD_STEPS,
    LATE_WINDOW,
    TRIAL_STEPS,
    AutoDepth,
    FixedDepth,
    MeasuredDepth,
    deepest,
    depth_policy,
)
from aiosched.scheduler.overlap import NoOverlap


def a_batch(decodes=1, prompts=0, complete=None):
    """``prompts`` that are read in, ``complete`` of them to their end (all, if not said)."""
    complete = prompts if complete is None else complete
    return SimpleNamespace(
        inputs=SimpleNamespace(num_decodes=decodes),
        requests=(None,) * (decodes + prompts),
        sampled=(None,) * (decodes + complete),
        mode=ForwardMode.EXTEND if prompts else ForwardMode.DECODE,
    )


LONE_PROMPT = a_batch(decodes=0, prompts=1)


def test_a_fixed_depth_is_the_same_for_every_batch():
    assert FixedDepth(2).choose(LONE_PROMPT, True) == (2, None)
    assert FixedDepth(0).choose(a_batch(), False) == (0, NoOverlap.DEPTH)


@pytest.mark.parametrize("policy", [AutoDepth, MeasuredDepth])
def test_a_first_token_that_is_due_is_waited_for(policy):
    assert policy().choose(LONE_PROMPT, True) == (0, NoOverlap.FIRST_TOKEN)


@pytest.mark.parametrize("policy", [AutoDepth, MeasuredDepth])
@pytest.mark.parametrize(
    ("batch", "alone"),
    [
        (LONE_PROMPT, False),  # others wait
        (a_batch(decodes=1, prompts=1), True),  # others decode
        (a_batch(decodes=0, prompts=1, complete=0), True),  # more of the prompt is to come
        (a_batch(decodes=4), True),  # nothing is read in
    ],
)
def test_nothing_is_waited_for_while_something_else_can_run(policy, batch, alone):
    assert policy().choose(batch, alone) == (1, None)


class Program:
    """Decode steps of 5 ms on a device of its own, with a host that reacts when it says."""

    def __init__(self):
        self.policy = AutoDepth()
        self.now = 1.0

    def step(self, reaction):
        self.policy.committed(a_batch(), self.now, self.now + 0.005, self.now + 0.005)
        self.now += 0.005 + reaction
        self.policy.launched(self.now)
        return self.policy.choose(a_batch(), True)[0]


def test_a_host_that_is_late_again_and_again_gets_depth_2():
    program = Program()
    assert program.step(0.001) == 1
    assert program.step(0.020) == 1  # once is no habit
    assert [program.step(0.001) for _ in range(48)] == [1] * 48
    assert program.step(0.020) == 2


def test_it_goes_back_to_depth_1_when_it_has_not_been_late_for_a_while():
    program = Program()
    program.step(0.020)
    assert program.step(0.020) == 2
    depths = [program.step(0.001) for _ in range(LATE_WINDOW)]
    assert (depths[0], depths[-1]) == (2, 1)


def test_a_pause_in_which_nothing_was_to_do_is_no_lateness():
    program = Program()
    for _ in range(4):
        program.step(0.001)
        program.policy.rests()
        program.now += 10.0
        program.policy.launched(program.now)
    assert program.policy.choose(a_batch(), True) == (1, None)


class OneProcessor:
    """Decode steps on a CPU that take as long as their depth makes them."""

    def __init__(self, seconds):
        self.policy = MeasuredDepth()
        self.seconds = seconds  # by depth
        self.now = 0.0
        self.depths = []

    def run(self, steps, rows=4):
        for _ in range(steps):
            depth, _ = self.policy.choose(a_batch(decodes=rows), True)
            self.depths.append(depth)
            self.now += self.seconds[depth]
            self.policy.committed(a_batch(decodes=rows), 0.0, 0.0, self.now)
        return self.depths[-steps:]


TRIALS = 2 * TRIAL_STEPS + 2


@pytest.mark.parametrize(("seconds", "better"), [((0.9, 1.0), 0), ((1.0, 0.9), 1)])
def test_on_a_cpu_both_are_tried_and_the_faster_one_is_kept(seconds, better):
    cpu = OneProcessor(seconds)
    assert set(cpu.run(TRIALS)) == {0, 1}
    assert set(cpu.run(HOLD_STEPS // 2)) == {better}
    assert cpu.policy.choose(a_batch(decodes=4), True)[1] is (None if better else NoOverlap.SLOWER)


def test_it_tries_again_after_a_while_and_changes_its_mind():
    cpu = OneProcessor([0.9, 1.0])
    cpu.run(TRIALS + HOLD_STEPS // 2)
    cpu.seconds = [1.0, 0.9]
    cpu.run(HOLD_STEPS + TRIALS)
    assert set(cpu.run(HOLD_STEPS // 2)) == {1}


def test_trials_take_a_small_share_of_the_steps():
    cpu = OneProcessor([0.9, 1.0])
    cpu.run(TRIALS)
    assert cpu.run(20 * HOLD_STEPS).count(1) <= 20 * HOLD_STEPS * 0.04


def test_a_batch_of_another_size_breaks_a_trial_off_and_a_much_larger_one_calls_for_one():
    cpu = OneProcessor([0.9, 1.0])
    for rows in range(4, 40):  # no two steps alike: nothing can be compared
        cpu.run(1, rows=rows)
    assert set(cpu.depths) == {1}
    cpu.run(TRIALS, rows=40)
    assert set(cpu.run(50, rows=40)) == {0}
    cpu.seconds = [1.0, 0.9]
    cpu.run(TRIALS + 2, rows=400)
    assert set(cpu.run(50, rows=400)) == {1}


def test_a_cpu_measures_and_every_other_device_watches_for_lateness():
    assert isinstance(depth_policy("auto", "cpu"), MeasuredDepth)
    assert isinstance(depth_policy("auto", "cuda"), AutoDepth)
    assert isinstance(depth_policy(3, "cpu"), FixedDepth)
    assert (deepest("auto"), deepest(3)) == (2, 3)
