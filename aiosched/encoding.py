"""Encodings: the answers whose large prompts are being tokenized, off the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from aiosched.answer import Answer
from aiosched.errors import AioschedError, RequestFailed, twin
from aiosched.model.inputs import Int32Array
from aiosched.prompts import LargeText, PromptEncoder


class Encodings:
    """One task for each answer that has no requests yet; gone when it has, or has ended."""

    def __init__(self) -> None:
        self._tasks: dict[asyncio.Task[None], Answer] = {}

    def __len__(self) -> int:
        return len(self._tasks)

    @property
    def requests(self) -> int:
        """How many requests these answers will be, those that nobody wants any more left out."""
        return sum(answer.n for answer in self._tasks.values() if not answer.aborted)

    def start(
        self,
        prompts: PromptEncoder,
        answer: Answer,
        text: LargeText,
        submit: Callable[[Int32Array], None],
    ) -> None:
        """Tokenize ``text`` in a thread, then ``submit`` its ids, if ``answer`` is still wanted."""
        loop = asyncio.get_running_loop()
        coro = _encode(prompts, answer, text, submit)
        task = loop.create_task(coro, name=f"aiosched-encode-{answer.id}")
        self._tasks[task] = answer
        answer.encoding = task
        task.add_done_callback(self._done)

    async def finish(self) -> None:
        """Until those that are under way now have ended."""
        if self._tasks:
            await asyncio.wait(set(self._tasks))

    def cut_off(self) -> None:
        """End them; each reader gets a last event."""
        for answer in list(self._tasks.values()):
            answer.cut_off()

    def fail(self, error: AioschedError) -> None:
        """End them; each reader gets a twin of ``error``."""
        for task, answer in list(self._tasks.items()):
            task.cancel()
            answer.fail(twin(error))

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task).encoding = None


async def _encode(
    prompts: PromptEncoder,
    answer: Answer,
    text: LargeText,
    submit: Callable[[Int32Array], None],
) -> None:
    try:
        ids = await prompts.encode_large(text)
        if not answer.aborted and not answer.finished:
            submit(ids)
    except AioschedError as error:
        answer.fail(error)
    except Exception as error:  # of a plugged tokenizer
        failed = RequestFailed(f"request {answer.id!r}: its prompt cannot be tokenized")
        failed.__cause__ = error
        answer.fail(failed)
