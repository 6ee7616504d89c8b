"""Engine: what it refuses, and that it never leaves a reader waiting."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from conftest import Run
from engines import greedy, prompt, small_engine, tokens_of

from aiosched import (
    Engine,
    EngineConfig,
    EngineFailed,
    FinishReason,
    InvalidConfig,
    InvalidRequest,
    Status,
)
from aiosched.testing import HashModel, SimDevice, VirtualClock, oracle


@pytest.mark.parametrize(
    "settings",
    [
        {"dtype": "float16"},
        {"quantization": "int8"},
        {"compile": True},
        {"cache_dir": "/nowhere"},
        {"compute_threads": 3},
    ],
)
def test_settings_of_what_is_given_as_an_object_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(InvalidConfig) as caught:
        Engine(HashModel(), device=SimDevice(), **settings)
    assert caught.value.field in settings


@pytest.mark.parametrize("changed", [{"quantization": "int8"}, {"compile": True}])
def test_a_config_that_says_how_to_load_is_refused_beside_a_model_object(
    changed: dict[str, Any],
) -> None:
    with pytest.raises(InvalidConfig, match=f"{next(iter(changed))}=.*the model is an object"):
        Engine(HashModel(), config=EngineConfig(**changed))


@pytest.mark.parametrize("field", ["model", "device", "config"])
def test_objects_that_are_nothing_of_the_kind_are_refused_by_name(field: str) -> None:
    wrong: dict[str, Any] = {field: object()}
    with pytest.raises(InvalidConfig) as caught:
        Engine(**wrong)
    assert caught.value.field == field


def test_more_choices_than_there_are_places_are_refused_by_name(run: Run) -> None:
    async def main() -> None:
        async with small_engine(max_running_requests=2, max_queued_requests=3) as engine:
            with pytest.raises(InvalidRequest, match="n=6"):
                engine.generate([1], greedy(1, n=6))
            assert len((await engine.complete([1], greedy(1, n=5))).choices) == 5

    run(main())


def test_a_scheduler_task_that_is_cancelled_from_outside_fails_every_stream(run: Run) -> None:
    async def main() -> None:
        device = SimDevice()
        device.hold(label="forward")
        async with small_engine(device=device) as engine:
            stream = engine.generate([1, 2], greedy(4))
            reading = asyncio.create_task(tokens_of(stream))
            await device.reached(1, "forward")
            for task in asyncio.all_tasks():
                if task.get_name() == "aiosched-scheduler":
                    task.cancel()
            with pytest.raises(EngineFailed, match="cancelled"):
                await reading
            assert engine.health().status is Status.FAILED
            device.release(label="forward")

    run(main())


def test_after_an_abort_a_reader_sees_no_token_and_the_whole_has_those_computed() -> None:
    async def main() -> None:
        async with small_engine(device=SimDevice(forward_time=1.0), overlap_depth=0) as engine:
            ids = prompt(1, 5)
            stream = engine.generate(ids, greedy(100), request_id="cut")
            await asyncio.sleep(6.5)
            assert engine.abort("cut")
            events = [token async for token in stream]
            assert [(e.id, e.index, e.finish_reason) for e in events] == [
                (None, 6, FinishReason.ABORT)
            ]
            assert list((await stream).token_ids) == oracle(ids, 6)

    VirtualClock().run(main())


def test_a_cancelled_wait_for_the_whole_brings_backpressure_back() -> None:
    async def main() -> None:
        device = SimDevice(forward_time=1.0)
        async with small_engine(device=device, max_unread_tokens=4, reader_grace=1e6) as engine:
            stream = engine.generate([1, 2, 3], greedy(500))
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(3.5):
                    await stream
            await asyncio.sleep(50)
            assert engine.stats().paused == 1
            assert engine.stats().tokens < 10
            assert await tokens_of(stream) == oracle([1, 2, 3], 500)

    VirtualClock().run(main())
