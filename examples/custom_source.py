"""An engine that is fed from a queue of your own, and gives the answers back.

    python examples/custom_source.py

Each worker has one job in the engine, so the number of workers bounds how many are taken from the
queue at once. A job counts as done when its answer is stored, not before.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from aiosched import AioschedError, Engine, EngineConfig, SamplingParams

PARAMS = SamplingParams(temperature=0.0, max_tokens=24)


@dataclass
class Job:
    name: str
    prompt: str
    answer: str | AioschedError | None = None


async def work(engine: Engine, jobs: asyncio.Queue[Job]) -> None:
    """Answer jobs for ever. One that fails takes down neither the worker nor its neighbours."""
    while True:
        job = await jobs.get()
        try:
            job.answer = (await engine.complete(job.prompt, PARAMS, request_id=job.name)).text
        except AioschedError as error:
            job.answer = error
        finally:
            jobs.task_done()


async def answer_all(engine: Engine, todo: list[Job], workers: int = 8) -> None:
    jobs: asyncio.Queue[Job] = asyncio.Queue(maxsize=workers)
    async with asyncio.TaskGroup() as group:
        staff = [group.create_task(work(engine, jobs)) for _ in range(workers)]
        for job in todo:
            await jobs.put(job)
        await jobs.join()
        for worker in staff:
            worker.cancel()


async def main() -> None:
    todo = [Job(land, f"The capital of {land} is") for land in ("France", "Japan", "Kenya", "Peru")]
    async with Engine(config=EngineConfig.from_env()) as engine:
        await answer_all(engine, todo)
    for job in todo:
        print(f"{job.prompt} ... {job.answer!r}")


if __name__ == "__main__":
    asyncio.run(main())
