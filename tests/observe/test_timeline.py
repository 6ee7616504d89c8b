"""Timelines of engines, and what is drawn of them."""

from __future__ import annotations

import asyncio
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from conftest import Run
from engines import greedy, prompt, slow_device, small_engine
from observe.recorded import step

from aiosched import InvalidConfig, SamplingParams
from aiosched.device.sim import SimDevice
from aiosched.observe.page import page, summary
from aiosched.observe.timeline import Timeline, save


async def timeline_of(depth: int, **settings: Any) -> Timeline:
    """Two requests of 12 tokens on a device of 10 ms a step."""
    settings = {"overlap_depth": depth, "timeline": True} | settings
    async with small_engine(device=slow_device(), **settings) as engine:
        await asyncio.gather(*(engine.complete(prompt(i, 5), greedy(12)) for i in range(2)))
        return engine.timeline()


def test_a_timeline_in_virtual_time_is_on_the_devices_clock(vrun: Run) -> None:
    timeline = vrun(timeline_of(0))
    assert [record.step for record in timeline.records] == list(range(1, 13))
    assert [record.mode for record in timeline.records] == ["extend"] + ["decode"] * 11
    for record in timeline.records:
        assert (record.sequences, record.tokens) == (2, 2)
        assert record.device_seconds == pytest.approx(0.010)
        # The copy takes 5 ms more, and virtual time stands while the host works.
        assert record.landed == record.committed == pytest.approx(record.device_finished + 0.005)
        assert record.planning == record.launched == pytest.approx(record.device_started)
        assert (record.depth, record.reason) == (0, "depth 0")
    assert timeline.average().idle_gap_ms == pytest.approx(5.0 * 11 / 12)
    assert timeline.idle_share == pytest.approx(5 * 11 / (5 * 11 + 10 * 12))


def test_under_the_overlap_loop_a_step_is_launched_while_the_one_before_it_runs(vrun: Run) -> None:
    timeline = vrun(timeline_of(1))
    first, *rest = timeline.records
    assert (first.depth, first.reason) == (0, "nothing in flight")
    assert {(record.depth, record.reason) for record in rest} == {(1, None)}
    for before, after in zip(timeline.records, rest, strict=False):
        assert after.launched < before.device_finished + 1e-9
        assert after.device_started == pytest.approx(before.device_finished)
    assert timeline.idle_share == pytest.approx(0.0)


def test_a_step_that_was_held_back_says_why(vrun: Run) -> None:
    async def main() -> Timeline:
        settings: dict[str, Any] = {"overlap_depth": 1, "prefill_chunk_tokens": 4}
        settings["disable_consecutive_prefill_overlap"] = True
        async with small_engine(device=slow_device(), timeline=True, **settings) as engine:
            await engine.complete(prompt(0, 12), greedy(2))
            assert engine.stats().not_overlapped == {"consecutive prefill": 2}
            return engine.timeline()

    reasons = [record.reason for record in vrun(main()).records]
    assert reasons == ["nothing in flight", "consecutive prefill", "consecutive prefill", None]


def test_readers_take_their_turn_while_the_host_waits(vrun: Run) -> None:
    for record in vrun(timeline_of(1)).records:
        assert record.launched <= record.readers_began <= record.readers_ended <= record.landed


def test_time_that_the_host_spends_behind_a_forward_is_hidden(clock: Any, vrun: Run) -> None:
    """A scheduler that takes 2 ms to plan: hidden under the overlap loop, not under the normal."""

    async def main(depth: int) -> tuple[float, float, float]:
        device = SimDevice(forward_time=0.01)
        async with small_engine(device=device, overlap_depth=depth, timeline=True) as engine:
            scheduler = engine._runtime._scheduler
            plan = scheduler.plan

            def slowly() -> Any:
                clock.spend(0.002)
                return plan()

            scheduler.plan = slowly  # type: ignore[method-assign]
            await engine.complete(prompt(0, 5), greedy(40))
            stats, average = engine.stats(), engine.timeline().average()
            # The sums alone hold the turn in which nothing was left to plan.
            assert stats.recent.overlap_ratio == pytest.approx(stats.overlap_ratio, abs=0.03)
            assert average.overlap_ratio == pytest.approx(stats.recent.overlap_ratio)
            return stats.overlap_ratio, stats.recent.host_ms, stats.recent.idle_gap_ms

    ratio, host_ms, gap_ms = vrun(main(0))
    assert (ratio, host_ms) == (pytest.approx(0.0), pytest.approx(2.0, rel=0.05))
    assert gap_ms == pytest.approx(2.0, rel=0.05)
    ratio, host_ms, gap_ms = vrun(main(1))
    assert 0.9 < ratio < 1.0  # the first plan has nothing to hide behind
    assert (host_ms, gap_ms) == (pytest.approx(2.0, rel=0.05), pytest.approx(0.0))


def test_an_engine_that_does_not_record_has_no_timeline(vrun: Run) -> None:
    async def main() -> None:
        async with small_engine() as engine:
            with pytest.raises(InvalidConfig, match="timeline"):
                engine.timeline()

    vrun(main())


def test_a_timeline_is_a_snapshot(vrun: Run) -> None:
    async def main() -> None:
        async with small_engine(timeline=True) as engine:
            await engine.complete(prompt(0, 5), SamplingParams(max_tokens=2))
            before = engine.timeline()
            await engine.complete(prompt(1, 5), SamplingParams(max_tokens=2))
            assert len(engine.timeline()) == 2 * len(before) == 4

    vrun(main())


NORMAL = Timeline([step(1, 100.0, idle_gap_seconds=0.0), step(2, 107.0)], "normal loop")
OVERLAP = Timeline(
    [
        step(1, 200.0, idle_gap_seconds=0.0),
        step(2, 204.0, planning=201.0, depth=1, reason=None, idle_gap_seconds=0.0),
    ],
    "overlap </script> loop",
)


def test_the_perfetto_trace_has_a_process_for_each_timeline_and_a_track_for_each_lane() -> None:
    trace = json.loads(NORMAL.to_perfetto())
    events = trace["traceEvents"]
    names = {(e["tid"], e["args"]["name"]) for e in events if e["name"] == "thread_name"}
    assert names == {(1, "device"), (2, "host")}
    forwards = [e for e in events if e["ph"] == "X" and e["tid"] == 1]
    assert [(e["name"], e["ts"], e["dur"]) for e in forwards] == [
        ("decode 1", 0.0, 4e6),
        ("decode 2", 7e6, 4e6),
    ]
    assert forwards[1]["args"] == {
        "step": 2,
        "sequences": 2,
        "tokens": 2,
        "depth": 0,
        "reason": "depth 0",
        "device_ms": 4000.0,
        "host_ms": 2000.0,
        "idle_gap_ms": 2000.0,
        "overlap_ratio": 0.25,
    }
    host = [e["name"] for e in events if e["ph"] == "X" and e["tid"] == 2]
    assert host[:4] == ["plan 1", "launch 1", "readers", "commit 1"]


def test_an_arrow_of_the_trace_begins_and_ends_within_blocks_of_its_step() -> None:
    events = json.loads(OVERLAP.to_perfetto())["traceEvents"]
    blocks = {(e["tid"], e["name"]): (e["ts"], e["ts"] + e["dur"]) for e in events if "dur" in e}
    for number in (1, 2):
        ends = [e for e in events if e.get("id", 0) & 0xFFFF == number and e["ph"] in "sf"]
        assert [e["ph"] for e in ends] == ["s", "f"]
        for e, name in zip(ends, (f"decode {number}", f"commit {number}"), strict=True):
            began, ended = blocks[e["tid"], name]
            assert began <= e["ts"] < ended


def test_a_moment_that_is_unknown_is_not_drawn() -> None:
    never = step(3, 100.0, device_started=0.0, device_finished=0.0, readers_ended=0.0)
    events = json.loads(Timeline([never]).to_perfetto())["traceEvents"]
    blocks = {e["name"] for e in events if e["ph"] == "X"}
    assert blocks == {"plan 3", "launch 3", "commit 3"}
    assert not any(e["ph"] in "sf" for e in events)
    assert data_of(page([Timeline([never])]))["timelines"][0]["steps"] == []


def data_of(text: str) -> Any:
    """What the page hands to its script."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def test_the_page_holds_every_step_in_milliseconds_from_the_start_of_the_first() -> None:
    data = data_of(page([NORMAL, OVERLAP]))
    titles = [timeline["title"] for timeline in data["timelines"]]
    assert titles == ["normal loop", "overlap </script> loop"]
    fields = re.search(r"FIELDS = \[(.*?)\]", page([]), re.DOTALL)
    assert fields is not None
    names = re.findall(r'"(\w+)"', fields[1])
    rows = [dict(zip(names, row, strict=True)) for row in data["timelines"][0]["steps"]]
    assert [row["step"] for row in rows] == [1, 2]
    assert [row["deviceStarted"] for row in rows] == [0.0, 7000.0]
    assert (rows[1]["planning"], rows[1]["committed"]) == (6000.0, 12000.0)
    assert (rows[1]["hostMs"], rows[1]["overlapRatio"], rows[1]["idleMs"]) == (2000.0, 0.25, 2000.0)


def test_time_begins_where_the_timeline_says() -> None:
    moved = Timeline(NORMAL.records, origin=107.0)
    assert [row[12] for row in data_of(moved.to_html())["timelines"][0]["steps"]] == [-7000.0, 0.0]


class References(HTMLParser):
    """Every attribute and tag by which a page would load something."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [f"{tag} {name}" for name, _ in attrs if name in ("src", "href", "srcset")]
        if tag in ("link", "iframe", "img", "object", "embed"):
            self.found.append(tag)


def test_the_page_loads_nothing() -> None:
    text = page([NORMAL, OVERLAP], "a & b")
    parser = References()
    parser.feed(text)
    assert parser.found == []
    assert "@import" not in text and "url(" not in text and "fetch(" not in text
    assert "{{" not in text
    assert "<h1>a &amp; b</h1>" in text


def test_the_summary_says_what_was_measured_and_no_more() -> None:
    assert summary([]) == "No step was recorded."
    assert summary([NORMAL]) == (
        "5000.00 ms a step. The device stood idle 20.0% of the time; 25% of the host's 2000.00 ms "
        "a step was hidden behind its work."
    )
    assert summary([NORMAL, OVERLAP]) == (
        "From 5000.00 to 4000.00 ms a step, 20% less: the device stood idle 20.0% of the time in "
        "the normal loop, 0.0% in the overlap </script> loop."
    )
    assert "25% more" in summary([OVERLAP, NORMAL])


def test_the_ending_of_the_name_says_what_is_written(tmp_path: Path) -> None:
    NORMAL.save(tmp_path / "a.html")
    assert (tmp_path / "a.html").read_text(encoding="utf-8") == NORMAL.to_html()
    save([NORMAL, OVERLAP], str(tmp_path / "a.json"), "two loops")
    trace = json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))
    assert {e["pid"] for e in trace["traceEvents"]} == {1, 2}
    assert trace["otherData"] == {"heading": "two loops"}
    with pytest.raises(ValueError, match=r"\.html or \.json"):
        NORMAL.save(tmp_path / "a.png")
