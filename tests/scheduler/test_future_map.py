from __future__ import annotations

import asyncio
import subprocess
import sys

import numpy as np
import pytest
import torch

from aiosched.device.stream import InFlight
from aiosched.model.inputs import StepResult
from aiosched.scheduler.future_map import FutureMap, RelayError, RelayPayload


def ids(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


@pytest.mark.parametrize("debug", [False, True])
def test_what_was_stashed_is_gathered_by_row(debug: bool) -> None:
    relay = FutureMap(8, debug=debug)
    relay.stash(ids(3, 8, 1), ids(1, 4, 2), ids(30, 80, 10))
    assert relay.gather(ids(1, 3), ids(2, 1)).tolist() == [10, 30]
    assert relay.gather(ids(8), ids(4)).tolist() == [80]


def test_a_later_step_of_the_same_owner_replaces_the_token() -> None:
    relay = FutureMap(4, debug=True)
    relay.stash(ids(2), ids(1), ids(5))
    relay.stash(ids(2), ids(1), ids(6))
    assert relay.gather(ids(2), ids(1)).tolist() == [6]


def test_a_late_write_of_an_old_owner_is_dropped() -> None:
    """C06: the new owner's token came from the host before the old owner's step was done."""
    relay = FutureMap(4, debug=True)
    relay.stash(ids(2), ids(8), ids(77))
    relay.stash(ids(1, 2, 3), ids(1, 7, 1), ids(11, 22, 33))
    assert relay.gather(ids(1, 2, 3), ids(1, 8, 1)).tolist() == [11, 77, 33]


def test_debug_mode_refuses_another_owners_value() -> None:
    relay = FutureMap(4, debug=True)
    relay.stash(ids(1, 2), ids(5, 6), ids(10, 20))
    with pytest.raises(RelayError, match="row 2 read for generation 9, written by 6") as caught:
        relay.gather(ids(1, 2), ids(5, 9))
    assert (caught.value.row, caught.value.expected, caught.value.found) == (2, 9, 6)


def test_debug_mode_lets_each_value_be_consumed_once() -> None:
    relay = FutureMap(4, debug=True)
    relay.stash(ids(1, 2), ids(5, 6), ids(10, 20))
    relay.gather(ids(2), ids(6))
    with pytest.raises(RelayError, match=r"row 2 .* consumed already") as caught:
        relay.gather(ids(1, 2), ids(5, 6))
    assert (caught.value.row, caught.value.expected, caught.value.found) == (2, 6, 6)
    assert relay.gather(ids(1), ids(5)).tolist() == [10]  # a refused read consumes nothing


def test_debug_mode_refuses_a_row_that_was_never_written() -> None:
    with pytest.raises(RelayError, match="row 3"):
        FutureMap(4, debug=True).gather(ids(3), ids(1))


def test_a_gathered_value_does_not_change_afterwards() -> None:
    relay = FutureMap(4, debug=True)
    relay.stash(ids(1), ids(1), ids(10))
    gathered = relay.gather(ids(1), ids(1))
    relay.stash(ids(1), ids(1), ids(11))
    assert gathered.tolist() == [10]


def test_without_debug_mode_nothing_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    relay = FutureMap(4)
    rows, generations, tokens = ids(1, 2), ids(1, 1), ids(5, 6)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a value of the device was read on the host")

    for name in ("item", "tolist", "numpy", "cpu", "nonzero", "__bool__", "__int__"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    relay.stash(rows, generations, tokens)
    gathered = relay.gather(rows, generations)
    monkeypatch.undo()
    assert gathered.tolist() == [5, 6]


def test_a_payload_holds_ids_of_the_vocabulary_only() -> None:
    assert RelayPayload.of(ids(-1, 0, 9, 10), 10).tokens.tolist() == [0, 0, 9, 9]


def result(*tokens: int) -> StepResult:
    return StepResult(np.array(tokens, np.int64))


def test_an_arrival_is_awaited_and_given_out_once() -> None:
    async def main() -> None:
        relay, loop = FutureMap(4), asyncio.get_running_loop()
        first: InFlight[StepResult] = InFlight(1, "copy", loop)
        second: InFlight[StepResult] = InFlight(2, "copy", loop)
        relay.expect(1, first)
        relay.expect(2, second)
        assert len(relay._expected) == 2
        second._finish(result(7))
        assert (await relay.arrival(2)).tokens.tolist() == [7]
        reader = asyncio.ensure_future(relay.arrival(1))
        await asyncio.sleep(0)
        assert not reader.done()
        assert first._finish(result(3, 4))
        first._wake()
        assert (await reader).tokens.tolist() == [3, 4]
        assert len(relay._expected) == 0
        with pytest.raises(KeyError):
            await relay.arrival(1)

    asyncio.run(main())


def test_a_cancelled_wait_loses_no_result() -> None:
    async def main() -> None:
        relay = FutureMap(4)
        copy: InFlight[StepResult] = InFlight(1, "copy", asyncio.get_running_loop())
        relay.expect(1, copy)
        reader = asyncio.ensure_future(relay.arrival(1))
        await asyncio.sleep(0)
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        assert len(relay._expected) == 1
        copy._finish(result(9))
        assert (await relay.arrival(1)).tokens.tolist() == [9]

    asyncio.run(main())


def test_a_failed_step_raises_at_its_arrival_and_is_forgotten() -> None:
    async def main() -> None:
        relay = FutureMap(4)
        copy: InFlight[StepResult] = InFlight(1, "copy", asyncio.get_running_loop())
        relay.expect(1, copy)
        copy._finish(None, OSError("the device is gone"))
        with pytest.raises(OSError, match="gone"):
            await relay.arrival(1)
        assert len(relay._expected) == 0

    asyncio.run(main())


def test_a_step_is_expected_once() -> None:
    async def main() -> None:
        relay = FutureMap(4)
        copy: InFlight[StepResult] = InFlight(1, "copy", asyncio.get_running_loop())
        relay.expect(1, copy)
        with pytest.raises(ValueError, match="step 1"):
            relay.expect(1, copy)

    asyncio.run(main())


def test_importing_the_module_loads_no_torch() -> None:
    code = "import sys, aiosched.scheduler.future_map; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
