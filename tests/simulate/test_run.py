"""Simulations: what a known cost must come to, and that nothing depends on the day."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import numpy as np
import pytest
from simulations import calibration

from aiosched.config import EngineConfig
from aiosched.simulate.cost import StepCost
from aiosched.simulate.generate import generate
from aiosched.simulate.metrics import Slo, summary
from aiosched.simulate.router import ROUTERS
from aiosched.simulate.run import simulate
from aiosched.simulate.serve import Prompts
from aiosched.simulate.trace import TraceRequest
from aiosched.simulate.workload import Workload


def asks(arrival=0.0, prompt=100, output=11, prefix_id=None, prefix=0):
    return TraceRequest(
        arrival=arrival,
        prompt_tokens=prompt,
        output_tokens=output,
        prefix_id=prefix_id,
        prefix_tokens=prefix,
    )


def served(*trace, depth=1, replicas=1, router="round-robin", given=None, **settings):
    config = EngineConfig(overlap_depth=depth, **settings)
    made = simulate(trace, given or calibration(), config, replicas=replicas, router=router)
    return made


@pytest.mark.parametrize("depth", [0, 1, 2, "auto"])
def test_a_lone_request_takes_what_its_steps_cost(depth):
    (answer,) = served(asks(arrival=3.0), depth=depth).served
    assert answer.error is None
    assert answer.tokens == 11
    assert answer.ttft == pytest.approx(0.110)  # 10 ms, and 100 tokens of 1 ms
    assert answer.tpot == pytest.approx(0.010)
    assert answer.end == pytest.approx(3.0 + 0.110 + 10 * 0.010)


def test_an_answer_of_one_token_has_no_time_per_token():
    (answer,) = served(asks(output=1)).served
    assert (answer.tokens, answer.tpot) == (1, None)
    assert answer.e2e == answer.ttft


HOST = calibration(host=StepCost(rows=((0, 0.004),)))


def test_the_normal_loop_pays_for_host_and_device_in_turn():
    (answer,) = served(asks(output=101), depth=0, given=HOST).served
    assert answer.tpot == pytest.approx(0.014)


def test_overlap_hides_the_host_behind_the_device():
    (answer,) = served(asks(output=101), depth=1, given=HOST).served
    assert answer.tpot == pytest.approx(0.010, rel=0.01)


def test_overlap_is_bound_by_a_host_that_is_slower():
    slow = calibration(host=StepCost(rows=((0, 0.025),)))
    (answer,) = served(asks(output=101), depth=1, given=slow).served
    assert answer.tpot == pytest.approx(0.025, rel=0.02)


def test_requests_that_come_together_share_their_steps():
    run = served(asks(prompt=10), asks(prompt=10))
    assert run.replicas[0].steps == pytest.approx(11, abs=1)
    assert {round(answer.ttft, 6) for answer in run.served} == {0.030}


def test_prompts_are_read_in_chunks():
    run = served(asks(prompt=250, output=1), prefill_chunk_tokens=100)
    assert run.replicas[0].steps == 3


def test_whoever_finds_no_place_waits_in_the_queue():
    run = served(*(asks(prompt=10) for _ in range(4)), max_running_requests=2)
    early, late = run.served[1], run.served[3]
    assert late.ttft > early.e2e
    row = summary(run, Slo())
    assert row["queue_max"] == 2
    # Two of the four waited until the first two had ended.
    assert row["queue_s"] == pytest.approx(early.e2e / 2, rel=0.1)


def test_more_than_may_wait_are_refused_and_counted():
    run = served(*(asks() for _ in range(5)), max_running_requests=1, max_queued_requests=1)
    assert [answer.error for answer in run.served].count("QueueFull") >= 1
    row = summary(run, Slo())
    assert row["failed"] == [a.error for a in run.served].count("QueueFull")


def test_a_prompt_that_never_fits_fails_alone():
    run = served(asks(prompt=5000), asks())
    assert [answer.error for answer in run.served] == ["PromptTooLong", None]


def test_a_prompt_that_fits_no_memory_is_never_drawn():
    run = served(asks(prompt=2**31 - 1), asks(prompt=2**31 - 1, prefix_id="a", prefix=2**31 - 1))
    assert [answer.error for answer in run.served] == ["PromptTooLong"] * 2


def test_a_run_that_takes_no_time_has_no_rates():
    run = served(asks(prompt=5000))
    row = summary(run, Slo())
    assert run.seconds == 0
    assert row["failed"] == row["requests"] == 1
    assert row["goodput"] is row["throughput"] is row["utilisation"] is row["queue_mean"] is None


def test_a_trace_may_be_years_long():
    (answer,) = served(asks(arrival=2e7)).served
    assert answer.ttft == pytest.approx(0.110)


def test_when_pages_run_out_requests_are_retracted_and_still_answered():
    trace = [asks(prompt=16, output=200) for _ in range(4)]
    run = served(*trace, kv_tokens=512, prefix_cache=False)
    assert all(answer.error is None and answer.tokens == 200 for answer in run.served)
    assert run.replicas[0].retractions > 0


def test_a_prefix_is_read_in_once():
    first, second = served(
        asks(prompt=170, prefix_id="a", prefix=160),
        asks(arrival=5.0, prompt=170, prefix_id="a", prefix=160),
    ).served
    assert (first.cached_tokens, second.cached_tokens) == (0, 160)
    assert second.ttft == pytest.approx(0.020)


def test_without_a_prefix_cache_it_is_read_in_again():
    trace = [asks(arrival=t, prompt=170, prefix_id="a", prefix=160) for t in (0.0, 5.0)]
    assert served(*trace, prefix_cache=False).served[1].cached_tokens == 0


def test_prompts_share_their_prefix_and_nothing_else():
    prompts = Prompts(1024)
    a, b, c = (
        prompts.of(index, asks(prompt=40, prefix_id=name, prefix=20))
        for index, name in enumerate(("x", "x", "y"))
    )
    assert (a[:20] == b[:20]).all()
    assert (a[20:] != b[20:]).any()
    assert (a[:20] != c[:20]).any()


def test_a_longer_prefix_of_the_same_name_begins_like_the_shorter():
    prompts = Prompts(1024)
    short = prompts.of(0, asks(prompt=20, prefix_id="x", prefix=20))
    long = prompts.of(1, asks(prompt=30, prefix_id="x", prefix=30))
    assert (short == long[:20]).all()


@pytest.mark.parametrize("router", ROUTERS)
def test_every_router_serves_everybody(router):
    trace = generate(Workload(rate=20.0, requests=60, prompt_tokens=(8, 32), prefixes=4))
    run = served(*trace, replicas=3, router=router)
    assert all(answer.error is None for answer in run.served)
    assert {answer.replica for answer in run.served} == {0, 1, 2}


def test_prefix_aware_routing_finds_more_in_the_caches():
    trace = generate(
        Workload(rate=2.0, requests=80, prompt_tokens=(8, 16), prefixes=12, prefix_tokens=64)
    )
    shares = {
        router: summary(served(*trace, replicas=4, router=router), Slo())["cached_share"]
        for router in ("round-robin", "prefix-aware")
    }
    assert shares["prefix-aware"] > shares["round-robin"] + 0.1


def test_four_replicas_are_not_slowed_by_each_other():
    trace = [asks(prompt=10) for _ in range(4)]
    alone = served(trace[0], given=HOST).served[0]
    for answer in served(*trace, replicas=4, given=HOST).served:
        assert (answer.ttft, answer.tpot) == (alone.ttft, alone.tpot)


REPEAT = """
import msgspec, sys
sys.path[:0] = {path!r}
from simulations import calibration
from aiosched.config import EngineConfig
from aiosched.simulate.generate import generate
from aiosched.simulate.metrics import Slo, summary
from aiosched.simulate.run import simulate
from aiosched.simulate.workload import Workload
trace = generate(Workload(kind="bursty", rate=30.0, requests=80, prefixes=5, prefix_tokens=64))
config = EngineConfig(kv_tokens=4096, max_running_requests=8)
run = simulate(trace, calibration(), config, replicas=2, router="prefix-aware")
print(msgspec.json.encode([run.served, summary(run, Slo())]).decode())
"""


def test_the_same_seed_gives_the_same_result_to_the_bit_in_any_process():
    outputs = set()
    for hash_seed in ("1", "2"):
        code = REPEAT.format(path=[p for p in sys.path if p.endswith("tests")])
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": hash_seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        )
        outputs.add(done.stdout)
    (only,) = outputs
    assert len(msgspec.json.decode(only)[0]) == 80


def test_a_summary_adds_up():
    trace = generate(Workload(rate=5.0, requests=50, prompt_tokens=(8, 64), output_tokens=(2, 20)))
    run = served(*trace)
    row = summary(run, Slo(ttft=0.05, tpot=0.012))
    ttft = [1e3 * answer.ttft for answer in run.served]
    assert row["ttft_ms_mean"] == pytest.approx(np.mean(ttft))
    assert row["ttft_ms_p90"] == pytest.approx(np.percentile(ttft, 90))
    kept = [a for a in run.served if a.ttft <= 0.05 and (a.tpot is None or a.tpot <= 0.012)]
    assert 0 < len(kept) < 50
    assert row["slo_share"] == len(kept) / 50
    assert row["goodput"] == pytest.approx(len(kept) / run.seconds)
    assert row["output_tok_s"] == pytest.approx(
        sum(request.output_tokens for request in trace) / run.seconds
    )
    assert 0 < row["utilisation"] <= 1
