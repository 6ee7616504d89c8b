"""Routers, by the replica that each request gets."""

from __future__ import annotations

import pytest

from aiosched.simulate.router import GUARD, ROUTERS, LeastLoaded, PrefixAware, RoundRobin
from aiosched.simulate.trace import TraceRequest


def request(prefix_id=None):
    tokens = 0 if prefix_id is None else 8
    return TraceRequest(
        arrival=0.0, prompt_tokens=16, output_tokens=1, prefix_id=prefix_id, prefix_tokens=tokens
    )


def test_round_robin_takes_turns_whatever_the_loads():
    router = RoundRobin()
    assert [router.route(request(), [9, 0, 0]) for _ in range(4)] == [0, 1, 2, 0]


def test_least_loaded_takes_the_emptiest():
    assert LeastLoaded().route(request(), [3, 1, 2]) == 1


def test_least_loaded_takes_turns_among_equals():
    router = LeastLoaded()
    assert [router.route(request(), [0, 0, 0]) for _ in range(4)] == [0, 1, 2, 0]


def test_requests_of_one_prefix_stay_together():
    router = PrefixAware()
    home = router.route(request("a"), [1, 0, 0])
    assert router.route(request("b"), [1, 1, 0]) != home
    assert router.route(request("a"), [0, 3, 3]) == home == 1


def test_a_home_that_is_too_busy_passes_its_prefix_on():
    router = PrefixAware()
    assert router.route(request("a"), [0, 0]) == 0
    assert router.route(request("a"), [GUARD - 1, 0]) == 0
    assert router.route(request("a"), [GUARD, 0]) == 1
    assert router.route(request("a"), [0, GUARD - 1]) == 1


def test_a_request_without_a_prefix_goes_to_the_least_loaded():
    router = PrefixAware()
    router.route(request("a"), [0, 0])
    assert router.route(request(), [5, 2]) == 1


@pytest.mark.parametrize("name", ROUTERS)
def test_one_replica_gets_everything(name):
    router = ROUTERS[name]()
    assert {router.route(request(prefix), [7]) for prefix in (None, "a", "b")} == {0}
