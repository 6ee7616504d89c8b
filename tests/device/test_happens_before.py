from __future__ import annotations

import gc

import numpy as np
import pytest

from aiosched.device.happens_before import HappensBefore, RaceError


class Host:
    """Launches steps on streams of a checker, in short words."""

    def __init__(self) -> None:
        self.checker = HappensBefore()

    def launch(self, stream, *, after=(), reads=(), writes=()):
        return self.checker.launched(stream, f"work on {stream}", after, reads, writes)

    def read(self, *buffers):
        self.checker.host(buffers, ())

    def write(self, *buffers):
        self.checker.host((), buffers)

    def saw(self, clock):
        self.checker.observed(clock)


def test_work_is_behind_all_that_the_host_did_before_its_launch():
    host = Host()
    host.write("x")
    host.launch("forward", reads=["x"])
    host.launch("copy", reads=["x"])


def test_the_host_is_behind_work_only_after_it_saw_it_finished():
    host = Host()
    work = host.launch("copy", writes=["x"])
    with pytest.raises(RaceError):
        host.read("x")
    host.saw(work)
    host.read("x")
    host.write("x")


def test_two_reads_never_conflict():
    host = Host()
    host.launch("forward", reads=["x"])
    host.launch("copy", reads=["x"])
    host.read("x")


def test_a_stream_is_ordered_in_itself():
    host = Host()
    for _ in range(3):
        host.launch("forward", reads=["x"], writes=["x"])


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"writes": ["x"]}, {"reads": ["x"]}),
        ({"reads": ["x"]}, {"writes": ["x"]}),
        ({"writes": ["x"]}, {"writes": ["x"]}),
    ],
)
def test_conflicting_work_of_two_streams_needs_an_edge(first, second):
    host = Host()
    work = host.launch("forward", **first)
    with pytest.raises(RaceError):
        host.launch("copy", **second)
    host = Host()
    work = host.launch("forward", **first)
    host.launch("copy", after=[work], **second)


def test_order_is_transitive_over_streams_and_the_host():
    host = Host()
    stage = host.launch("schedule", writes=["x"])
    forward = host.launch("forward", after=[stage])
    copy = host.launch("copy", after=[forward])
    host.launch("copy", writes=["x"])
    host.saw(copy)
    with pytest.raises(RaceError):
        host.read("x")  # the later work on the copy stream still writes it

    host = Host()
    stage = host.launch("schedule", writes=["x"])
    forward = host.launch("forward", after=[stage])
    host.saw(forward)
    host.write("x")
    host.launch("copy", reads=["x"])


def test_seeing_work_does_not_order_the_host_behind_later_work_of_the_stream():
    host = Host()
    first = host.launch("copy", writes=["first"])
    host.launch("copy", writes=["second"])
    host.saw(first)
    host.read("first")
    with pytest.raises(RaceError):
        host.read("second")


def test_work_launched_before_the_host_touched_a_buffer_is_not_behind_the_host():
    host = Host()
    host.launch("forward", reads=["x"])
    with pytest.raises(RaceError):
        host.write("x")


def test_every_read_since_the_last_write_is_a_rival_of_the_next_write():
    host = Host()
    forward = host.launch("forward", reads=["x"])
    copy = host.launch("copy", reads=["x"])
    host.saw(forward)
    with pytest.raises(RaceError, match="work on copy"):
        host.write("x")
    host.saw(copy)
    host.write("x")


def test_the_error_names_both_accesses_and_the_buffer():
    host = Host()
    host.launch("copy", writes=["target 0"])
    with pytest.raises(RaceError) as caught:
        host.read("target 0")
    assert str(caught.value) == (
        "nothing orders the read by the host behind the write by work on copy on stream 'copy' "
        "of buffer 'target 0'"
    )
    assert (caught.value.earlier.actor, caught.value.later.actor) == ("copy", "host")


def test_a_planner_that_reuses_its_staging_buffer_before_the_copy_left_is_caught():
    staging = np.zeros(4)

    def plan(host):
        host.write(staging)
        return host.launch("schedule", reads=[staging])

    host = Host()
    plan(host)
    with pytest.raises(RaceError, match="a buffer of type ndarray"):
        plan(host)
    host = Host()
    host.saw(plan(host))
    plan(host)


def test_arrays_are_told_apart_by_identity_and_are_not_kept_alive():
    host = Host()
    for _ in range(100):
        array = np.zeros(4)
        host.launch("copy", writes=[array])
        host.read(np.zeros(4))
        del array
    gc.collect()
    assert host.checker._buffers == {}
