"""``aiosched bench lag``: how lag is counted, and that app, client and command run."""

from __future__ import annotations

import asyncio
import gc
import json
import math

import pytest
from click.testing import CliRunner

from aiosched.bench.lag import row
from aiosched.bench.lag.phase import Phase
from aiosched.bench.lag.ticker import percentile_ms, ticking, watching_collections
from aiosched.cli.app import app


def test_a_loop_that_stands_still_is_late_for_every_tick_that_it_missed(vrun, clock):
    async def main():
        async with ticking(interval=1.0, now=clock.time) as lags:
            await asyncio.sleep(2.5)
            clock.spend(3.0)
            await asyncio.sleep(1.0)
        return lags

    assert vrun(main()) == [0.0, 0.0, 2.5, 1.5, 0.5, 0.0]


def test_nothing_ticks_after_the_block(vrun, clock):
    async def main():
        async with ticking(interval=1.0, now=clock.time) as lags:
            await asyncio.sleep(1.5)
        await asyncio.sleep(5.0)
        return lags

    assert vrun(main()) == [0.0]


def test_percentiles_are_values_that_were_measured():
    seconds = [index / 1e3 for index in range(1, 102)]
    assert percentile_ms(seconds, 50) == pytest.approx(51.0)
    assert percentile_ms(seconds, 99) == pytest.approx(100.0)
    assert percentile_ms([*seconds, 5.0], 99.5) == pytest.approx(5000.0)
    assert math.isnan(percentile_ms([], 99))


def test_collections_are_noted_within_the_block_only():
    with watching_collections() as seen:
        gc.collect()
    gc.collect()
    assert len(seen.pauses) == 1


def test_a_row_has_medians_of_percentiles_and_the_largest_maximum():
    rounds = [phase(p99_ms=p99, max_ms=most) for p99, most in ((3.0, 9.0), (1.0, 7.0), (2.0, 8.0))]
    found = row("loaded", rounds)
    assert found["load"] == "loaded"
    assert (found["p99_ms"], found["p99_low_ms"], found["p99_high_ms"]) == (2.0, 1.0, 3.0)
    assert found["max_ms"] == 9.0


def phase(**values) -> Phase:
    return Phase(**(dict.fromkeys(Phase.__struct_fields__, 0.0) | {"large": []} | values))


def test_at_tiny_size_it_prints_both_loads_and_how_the_large_prompt_was_refused():
    result = CliRunner().invoke(app, ["bench", "lag", "--tiny", "--json"], prog_name="aiosched")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert [row["load"] for row in report["rows"]] == ["unloaded", "loaded"]
    for found in report["rows"]:
        assert {"p50_ms", "p99_ms", "max_ms", "ping_p50_ms", "ping_p99_ms"} <= found.keys()
        assert found["ping_p50_ms"] > 0
    assert report["rows"][1]["tok_s"] > 0
    # The client's bytes are more tokens than the tiny model takes: refused, once tokenized.
    assert "PromptTooLong" in " ".join(report["notes"])
