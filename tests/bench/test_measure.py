"""How benchmarks measure: turns, medians, spread, and the use that others make of the machine."""

from __future__ import annotations

import asyncio
import math

import pytest

from aiosched.bench.measure import Foreign, Spread, alternate, watching_others


def test_the_spread_of_few_runs_is_their_range():
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0, 3)


def test_the_spread_of_many_runs_leaves_out_the_outer_quarters():
    spread = Spread.of([9.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 100.0])
    assert (spread.median, spread.low, spread.high, spread.runs) == (4.5, 3.0, 6.0, 8)


def test_no_runs_have_no_spread():
    with pytest.raises(ValueError, match="no runs"):
        Spread.of([])


def test_each_side_runs_once_a_round_and_each_goes_first_in_turn():
    order = []

    def side(name):
        async def run():
            order.append(name)
            return len(order)

        return run

    results = asyncio.run(alternate({"a": side("a"), "b": side("b")}, 3))
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert results == {"a": [1, 4, 5], "b": [2, 3, 6]}


def test_a_run_of_our_own_is_not_counted_as_foreign():
    with watching_others() as others:
        sum(range(3_000_000))
    assert others.cores >= 0 or math.isnan(others.cores)


def test_a_machine_that_does_not_say_counts_as_quiet():
    assert Foreign().quiet
    busy = Foreign()
    busy.cores = 0.5
    assert not busy.quiet
