"""Traces: what a line may say, and what generators make."""

from __future__ import annotations

import numpy as np
import pytest

from aiosched.errors import InvalidConfig
from aiosched.simulate.generate import generate
from aiosched.simulate.trace import InvalidTrace, TraceRequest, duration, read_trace, write_trace
from aiosched.simulate.workload import KINDS, Workload


def test_a_trace_reads_back_as_it_was_written(tmp_path):
    trace = generate(Workload(requests=20, prefixes=3))
    write_trace(tmp_path / "trace.jsonl", trace)
    assert read_trace(tmp_path / "trace.jsonl") == trace


def test_requests_come_in_the_order_of_their_arrival(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"arrival": 2, "prompt_tokens": 3, "output_tokens": 4}\n\n'
        '{"arrival": 1.5, "prompt_tokens": 5, "output_tokens": 6, "prefix_id": null}\n'
    )
    assert [request.prompt_tokens for request in read_trace(path)] == [5, 3]


@pytest.mark.parametrize(
    "line",
    [
        "no json",
        '{"arrival": 1, "prompt_tokens": 3}',
        '{"arrival": 1, "prompt_tokens": 3, "output_tokens": 1, "colour": "red"}',
        '{"arrival": -1, "prompt_tokens": 3, "output_tokens": 1}',
        '{"arrival": 1, "prompt_tokens": 0, "output_tokens": 1}',
        '{"arrival": 1, "prompt_tokens": 3, "output_tokens": 1, "prefix_id": "a", '
        '"prefix_tokens": 4}',
        '{"arrival": 1, "prompt_tokens": 3, "output_tokens": 1, "prefix_tokens": 2}',
        '{"arrival": 1733000000, "prompt_tokens": 3, "output_tokens": 1}',
        '{"arrival": 1, "prompt_tokens": 123456789012345678901234, "output_tokens": 1}',
        '{"arrival": 1, "prompt_tokens": 3, "output_tokens": 4000000000}',
    ],
)
def test_a_line_that_is_no_request_is_refused_with_its_number(tmp_path, line):
    path = tmp_path / "trace.jsonl"
    path.write_text('{"arrival": 1, "prompt_tokens": 3, "output_tokens": 1}\n' + line + "\n")
    with pytest.raises(InvalidTrace, match=r"trace\.jsonl, line 2: ") as caught:
        read_trace(path)
    assert caught.value.line == 2


@pytest.mark.parametrize(("encoding", "said"), [("utf-8-sig", "byte order"), ("utf-16", "UTF-16")])
def test_a_byte_order_mark_is_called_by_its_name(tmp_path, encoding, said):
    path = tmp_path / "trace.jsonl"
    path.write_text('{"arrival": 1, "prompt_tokens": 3, "output_tokens": 1}\n', encoding)
    with pytest.raises(InvalidTrace, match=said):
        read_trace(path)


def test_a_rate_that_takes_ages_is_refused_by_name():
    with pytest.raises(InvalidConfig, match="rate"):
        generate(Workload(rate=1e-9))


def test_an_empty_trace_is_refused(tmp_path):
    (tmp_path / "trace.jsonl").write_text("\n")
    with pytest.raises(InvalidTrace, match="empty"):
        read_trace(tmp_path / "trace.jsonl")


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_seed_makes_the_same_trace_and_another_seed_another(kind):
    workload = Workload(kind=kind, requests=50)
    assert generate(workload) == generate(workload)
    assert generate(workload) != generate(Workload(kind=kind, requests=50, seed=1))


@pytest.mark.parametrize("kind", KINDS)
def test_arrivals_ascend_and_keep_the_mean_rate(kind):
    workload = Workload(kind=kind, rate=2.0, requests=8000, burst_seconds=2.0, period=100.0)
    trace = generate(workload)
    arrivals = [request.arrival for request in trace]
    assert arrivals == sorted(arrivals)
    assert len(trace) / duration(trace) == pytest.approx(2.0, rel=0.1)


def test_another_kind_of_arrivals_brings_the_same_requests():
    made = [generate(Workload(kind=kind, requests=30, prefixes=2)) for kind in KINDS]
    lengths = [[(r.prompt_tokens, r.output_tokens, r.prefix_id) for r in trace] for trace in made]
    assert lengths[0] == lengths[1] == lengths[2]


def test_bursts_make_arrivals_less_even_than_poisson():
    def unevenness(kind):
        trace = generate(Workload(kind=kind, rate=10.0, requests=4000))
        seconds = np.bincount([int(request.arrival) for request in trace])
        return seconds.var() / seconds.mean()

    assert unevenness("poisson") == pytest.approx(1.0, rel=0.3)
    assert unevenness("bursty") > 5


def test_a_day_begins_at_its_low_and_peaks_half_a_period_later():
    trace = generate(Workload(kind="diurnal", rate=40.0, requests=4000, period=100.0))
    counts = np.bincount([int(request.arrival) // 10 for request in trace], minlength=10)
    assert counts[4:6].min() > 4 * max(counts[0], counts[9])


def test_lengths_keep_their_bounds_and_prefixes_stand_before_prompts():
    workload = Workload(
        requests=500, prompt_tokens=(3, 5), output_tokens=(7, 7), prefixes=4, prefix_tokens=10
    )
    trace = generate(workload)
    assert {r.prompt_tokens - r.prefix_tokens for r in trace} == {3, 4, 5}
    assert {r.output_tokens for r in trace} == {7}
    assert {r.prefix_id for r in trace} == {f"prefix-{n}" for n in range(4)}


@pytest.mark.parametrize(
    "fields",
    [
        {"kind": "weekly"},
        {"rate": 0.0},
        {"requests": 0},
        {"seed": -1},
        {"prompt_tokens": (5, 3)},
        {"output_tokens": (0, 3)},
        {"prefixes": -1},
        {"prefix_tokens": 0, "prefixes": 1},
        {"prefix_tokens": 10**11, "prefixes": 1},
        {"prompt_tokens": (1, 2**31)},
        {"requests": 10**14},
        {"seed": 2**64},
        {"rate": 1e-300},
        {"swing": 1.0},
        {"period": 0.0},
        {"burst_seconds": 1e-300, "kind": "bursty"},
        {"burst_seconds": 1e-3, "kind": "bursty", "rate": 1e-6},
    ],
)
def test_a_workload_that_makes_no_sense_is_refused_by_name(fields):
    with pytest.raises(InvalidConfig, match=next(iter(fields))):
        Workload(**fields)


def test_a_request_without_a_prefix_is_fine():
    assert TraceRequest(arrival=0.0, prompt_tokens=1, output_tokens=1).fault() is None
