"""Answer: the engine's side of a stream. It never refers to the stream itself.

A ``TokenStream`` that nobody holds any more is collected at once, and that is how a dropped stream
aborts its request: so the engine, its tasks and its requests know the answer alone.
"""

from __future__ import annotations

from aiosched.request import FinishReason
from aiosched.scheduler.inbox import Inbox
from aiosched.scheduler.requests import Reader, Request


class Answer:
    """What was asked under one request id: ``n`` requests, one reader.

    Attributes:
        requests: empty until the prompt is tokenized.
        error: why the answer failed before there were requests, or with the engine.
        aborted: its reader wants no more of it.
    """

    __slots__ = (
        "__weakref__",
        "aborted",
        "error",
        "id",
        "inbox",
        "reader",
        "requests",
        "unbounded",
    )

    def __init__(self, request_id: str, inbox: Inbox) -> None:
        self.id = request_id
        self.inbox = inbox
        self.reader = Reader()
        self.requests: tuple[Request, ...] = ()
        self.error: Exception | None = None
        self.aborted = False
        self.unbounded = False

    @property
    def finished(self) -> bool:
        """Whether nothing more is generated for it."""
        if self.error is not None:
            return True
        return bool(self.requests) and all(r.finish_reason is not None for r in self.requests)

    @property
    def finish_reason(self) -> FinishReason | None:
        """Of the first choice, once that has ended."""
        if self.requests:
            return self.requests[0].finish_reason
        if self.error is not None:
            return FinishReason.ERROR
        return FinishReason.ABORT if self.aborted else None

    def fail(self, error: Exception) -> None:
        """It ends before it began: there are no requests yet."""
        self.error = error
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
        self.inbox.tell(self.reader.notify)

    def read_without_limit(self) -> None:
        """The whole is wanted: never pause it for unread tokens."""
        self.unbounded = True
        for request in self.requests:
            request.unread_limit = 2**62
            if request.held_by_reader:
                self.inbox.resume(request)
