"""Answer: what the engine knows of a stream."""

from __future__ import annotations

import asyncio
from typing import Any

from conftest import Run

from aiosched.answer import Answer
from aiosched.request import FinishReason
from aiosched.scheduler.inbox import Inbox


class Submitted:
    finish_reason: FinishReason | None = None


def test_an_abort_before_there_are_requests_aborts_those_that_come_later(run: Run) -> None:
    async def main() -> None:
        inbox = Inbox(asyncio.get_running_loop())
        answer = Answer("a", inbox, n=2, unread_limit=8)
        answer.abort()  # from another thread it may fall between a look at it and begin()
        requests: Any = (Submitted(), Submitted())
        answer.begin(requests)
        assert tuple(inbox.aborts) == requests

    run(main())


def test_an_aborted_answer_tells_nobody_twice(run: Run) -> None:
    async def main() -> None:
        inbox = Inbox(asyncio.get_running_loop())
        answer = Answer("a", inbox, n=1, unread_limit=8)
        requests: Any = (Submitted(),)
        answer.begin(requests)
        answer.abort()
        answer.abort()
        assert tuple(inbox.aborts) == requests
        assert answer.finish_reason is None  # until the scheduler has taken note

    run(main())
