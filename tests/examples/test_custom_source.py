"""The example that feeds an engine from a queue."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from pathlib import Path
from typing import Any

from engines import assert_baseline, small_engine
from serving import letters, until
from talking_model import TalkingModel

import aiosched
from aiosched import PromptTooLong
from aiosched.device.sim import SimDevice

FILE = Path(__file__).parents[2] / "examples" / "custom_source.py"


def example() -> Any:
    spec = importlib.util.spec_from_file_location("custom_source", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


EXAMPLE = example()


def jobs(count: int) -> list[Any]:
    return [EXAMPLE.Job(f"job-{number}", f"say {number}") for number in range(count)]


def test_every_job_gets_its_own_answer(run):
    async def main() -> None:
        todo = jobs(40)
        async with small_engine(TalkingModel()) as engine:
            await EXAMPLE.answer_all(engine, todo)
            assert_baseline(engine)
        assert [job.answer for job in todo] == [letters(job.prompt, 24) for job in todo]

    run(main())


def test_no_more_jobs_are_in_the_engine_than_there_are_workers(run):
    async def main() -> None:
        device = SimDevice()
        device.hold(3, "forward")
        async with small_engine(TalkingModel(), device) as engine:
            task = asyncio.create_task(EXAMPLE.answer_all(engine, jobs(20), workers=3))
            await device.reached(3)
            for _ in range(50):
                assert engine.stats().running + engine.stats().waiting == 3
                await asyncio.sleep(0)
            device.release()
            await task
            assert engine.stats().finished == {"length": 20}

    run(main())


def test_a_job_that_fails_leaves_the_others_alone(run):
    async def main() -> None:
        todo = jobs(6)
        todo[2].prompt = "a" * 2000
        async with small_engine(TalkingModel()) as engine:
            await EXAMPLE.answer_all(engine, todo, workers=2)
        assert isinstance(todo.pop(2).answer, PromptTooLong)
        assert [job.answer for job in todo] == [letters(job.prompt, 24) for job in todo]

    run(main())


def test_a_source_that_is_cancelled_leaves_nothing_in_the_engine(run):
    async def main() -> None:
        device = SimDevice()
        device.hold(3, "forward")
        async with small_engine(TalkingModel(), device, reader_grace=1e6) as engine:
            task = asyncio.create_task(EXAMPLE.answer_all(engine, jobs(20)))
            await device.reached(3)
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled()
            device.release()
            await until(lambda: engine.stats().running + engine.stats().waiting == 0)
            await until(lambda: engine.stats().kv_pages_free + engine.stats().kv_pages_cached == 64)
            assert_baseline(engine)

    run(main())


def test_the_program_prints_one_line_for_each_job(run, monkeypatch, capsys):
    def engine(**_: object) -> aiosched.Engine:
        return small_engine(TalkingModel())

    monkeypatch.setattr(EXAMPLE, "Engine", engine)
    run(EXAMPLE.main())
    lines = capsys.readouterr().out.splitlines()
    prompt = "The capital of Peru is"
    assert lines[-1] == f"{prompt} ... {letters(prompt, 24)!r}"
    assert len(lines) == 4
