"""Answer: the engine's side of a stream. It never refers to the stream itself.

A ``TokenStream`` that nobody holds any more is collected at once, and that is how a dropped stream
aborts its request: so the engine, its tasks and its requests know the answer alone.
"""

from __future__ import annotations

import asyncio

from aiosched.request import FinishReason
from aiosched.scheduler.inbox import Inbox
from aiosched.scheduler.reader import Reader
from aiosched.scheduler.requests import Request


class Answer:
    """What was asked under one request id: ``n`` requests, one reader.

    Attributes:
        requests: empty until the prompt is tokenized.
        encoding: the task that tokenizes a large prompt.
        error: why the answer failed before there were requests, or with the engine.
        aborted: its reader wants no more of it.
        cut: the engine ended it before there were requests.
    """

    __slots__ = (
        "__weakref__",
        "aborted",
        "cut",
        "encoding",
        "error",
        "id",
        "inbox",
        "n",
        "reader",
        "requests",
        "unbounded",
        "unread_limit",
    )

    def __init__(self, request_id: str, inbox: Inbox, n: int, unread_limit: int) -> None:
        self.id = request_id
        self.inbox = inbox
        self.n = n
        self.unread_limit = unread_limit
        self.reader = Reader(inbox.loop)
        self.requests: tuple[Request, ...] = ()
        self.encoding: asyncio.Task[None] | None = None
        self.error: Exception | None = None
        self.aborted = False
        self.cut = False
        self.unbounded = False

    @property
    def finished(self) -> bool:
        """Whether nothing more is generated for it."""
        if self.error is not None or self.cut:
            return True
        return bool(self.requests) and all(r.finish_reason is not None for r in self.requests)

    @property
    def finish_reason(self) -> FinishReason | None:
        """Of the first choice, once that has ended."""
        if self.requests:
            return self.requests[0].finish_reason
        if self.error is not None:
            return FinishReason.ERROR
        return FinishReason.ABORT if self.aborted or self.cut else None

    def begin(self, requests: tuple[Request, ...]) -> None:
        """The prompt is tokenized. On the event loop."""
        self.requests = requests
        for request in requests:
            self.inbox.submit(request)
        if self.aborted:  # by another thread, which may have seen no requests yet
            for request in requests:
                self.inbox.abort(request)

    def fail(self, error: Exception) -> None:
        """It ends before it began: there are no requests yet."""
        self.error = error
        self.reader.notify()

    def cut_off(self) -> None:
        """The engine ends it, its reader is told. On the event loop."""
        if self.requests:
            for request in self.requests:
                self.inbox.abort(request)
            return
        self.cut = True
        self._stop_encoding()
        self.reader.notify()

    def abort(self) -> None:
        """From any thread, and from a finalizer; a second time does nothing."""
        if self.aborted:
            return
        self.aborted = True
        if self.finished:
            return
        for request in self.requests:
            self.inbox.abort(request)
        self.inbox.tell(self._stop_encoding)
        self.inbox.tell(self.reader.notify)

    def read_without_limit(self) -> None:
        """The whole is wanted: never pause it for unread tokens."""
        self.unbounded = True
        for request in self.requests:
            request.unread_limit = 2**62
            if request.held_by_reader:
                self.inbox.resume(request)

    def read_with_limit(self) -> None:
        """The whole is not wanted any more: a reader that is slow pauses it again."""
        self.unbounded = False
        for request in self.requests:
            request.unread_limit = self.unread_limit
            self.inbox.resume(request)  # makes commit look at what is unread

    def _stop_encoding(self) -> None:
        if self.encoding is not None:
            self.encoding.cancel()
