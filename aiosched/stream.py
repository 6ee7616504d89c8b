"""TokenStream: what ``Engine.generate`` returns.

A class and not an async generator: a generator that was never started never runs its cleanup, and
one that was left by ``break`` is cleaned up later, in a task that nobody knows. A stream knows at
each moment whether somebody still wants it:

- its reader stops for good (``break``, an exception, a cancelled task): the stream is dropped, its
  finalizer aborts the request at once;
- one read is cancelled (as ``asyncio.wait_for`` does): nothing is lost, the next read goes on. If
  none comes within ``reader_grace`` seconds the request is aborted, for somebody may keep the
  stream alive without knowing (a cancelled task's traceback does);
- its reader is slow: the request is paused at ``max_unread_tokens``, and resumes by being read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from types import TracebackType
from typing import Self

from aiosched.answer import Answer
from aiosched.errors import AioschedError, WrongEventLoop
from aiosched.request import Choice, Completion, FinishReason, Logprob, Token, Usage
from aiosched.scheduler.requests import Request
from aiosched.text.detokenizer import IncrementalDetokenizer

MakeDetokenizer = Callable[[bool], IncrementalDetokenizer | None]


class TokenStream:
    """The tokens of one request as they are generated.

    Iterate it (``async for token in stream``), use it as an async context manager (leaving the
    block aborts what is not finished), or await it for the whole ``Completion``. With ``n`` > 1 the
    tokens of all choices come in one stream and carry ``.choice``.

    Reading raises the request's own error, or ``EngineFailed`` and ``EngineClosed`` when the engine
    ended first. One task may read at a time. An aborted stream simply ends.
    """

    def __init__(
        self,
        answer: Answer,
        loop: asyncio.AbstractEventLoop,
        make_detokenizer: MakeDetokenizer,
        reader_grace: float,
    ) -> None:
        self._answer = answer
        self._loop = loop
        self._make_detokenizer = make_detokenizer
        self._reader_grace = reader_grace
        self._grace: asyncio.TimerHandle | None = None
        self._texts: dict[int, _LazyText] = {}
        self._ended: set[int] = set()  # choices whose last event was read
        self._turn = 0

    @property
    def request_id(self) -> str:
        return self._answer.id

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the first choice ended; ``None`` while it runs."""
        return self._answer.finish_reason

    def abort(self) -> None:
        """End the request before its next step. Plain, idempotent, callable from any thread."""
        self._answer.abort()
        self._forget_grace()

    async def aclose(self) -> None:
        """``abort()``, for ``contextlib.aclosing`` and the like."""
        self.abort()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.abort()

    def __del__(self) -> None:
        answer = getattr(self, "_answer", None)
        if answer is None:
            return
        if not answer.aborted and not answer.finished:
            answer.abort()
        self._forget_grace()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Token:
        self._resume_reading()
        while True:
            answer = self._answer
            if answer.aborted:
                raise StopAsyncIteration
            for request in self._in_turn():
                token = self._next_of(request)
                if token is not None:
                    return token
            if answer.error is not None:
                raise answer.error
            if answer.requests and len(self._ended) == len(answer.requests):
                raise StopAsyncIteration
            try:
                await self._wait()
            except asyncio.CancelledError:
                del self  # else the traceback, and with it a dead task, would hold the stream
                raise

    def __await__(self) -> Generator[object, None, Completion]:
        return self._completion().__await__()

    async def _completion(self) -> Completion:
        self._resume_reading()
        answer = self._answer
        answer.read_without_limit()
        while not answer.finished and not answer.aborted:
            await self._wait(whole=True)
        if answer.error is not None:
            raise answer.error
        for request in answer.requests:
            if request.error is not None:
                self.abort()
                raise request.error
        if not answer.requests:  # aborted while its prompt was tokenized
            choice = Choice(index=0, text="", token_ids=(), finish_reason=FinishReason.ABORT)
            usage = Usage(prompt_tokens=0, completion_tokens=0)
            return Completion(request_id=answer.id, choices=(choice,), usage=usage)
        first = answer.requests[0]
        return Completion(
            request_id=answer.id,
            choices=tuple(self._choice(request) for request in answer.requests),
            usage=Usage(
                prompt_tokens=len(first.prompt),
                completion_tokens=sum(len(r.output) for r in answer.requests),
                cached_tokens=first.cached_tokens,
            ),
            prompt_logprobs=_frozen(first.prompt_logprobs),
        )

    def _choice(self, request: Request) -> Choice:
        text = _LazyText(request, self._make_detokenizer)
        return Choice(
            index=request.choice,
            text="".join(text.at(i) for i in range(len(request.output))) + text.tail(),
            token_ids=tuple(request.output),
            finish_reason=request.finish_reason or FinishReason.ABORT,
            logprobs=_frozen(request.logprobs),
        )

    def _in_turn(self) -> tuple[Request, ...]:
        """The choices that are still read, beginning with another one each time."""
        requests = self._answer.requests
        if len(requests) <= 1:
            return () if self._ended else requests
        self._turn = (self._turn + 1) % len(requests)
        order = requests[self._turn :] + requests[: self._turn]
        return tuple(r for r in order if r.choice not in self._ended)

    def _next_of(self, request: Request) -> Token | None:
        """The next event of one choice, if there is one."""
        index, output = request.read, request.output
        reason = request.finish_reason
        if reason is FinishReason.ABORT:
            request.read = index = len(output)
        if index < len(output):
            request.read = index + 1
            if request.held_by_reader and 2 * (len(output) - index - 1) <= request.unread_limit:
                self._answer.inbox.resume(request)
            return self._token(request, index)
        if reason is None:
            return None
        self._ended.add(request.choice)
        if request.error is not None:
            self._answer.abort()
            raise request.error
        return Token(
            id=None,
            text=self._text(request).tail(),
            index=index,
            finish_reason=reason,
            choice=request.choice,
        )

    def _token(self, request: Request, index: int) -> Token:
        text = self._text(request)
        shown = text.at(index)
        reason = None
        if index + 1 == len(request.output) and request.error is None:
            reason = request.finish_reason
            if reason is not None:
                self._ended.add(request.choice)
                shown += text.tail()
        if request.logprobs is None and (index or request.prompt_logprobs is None):
            return Token(
                id=request.output[index],
                text=shown,
                index=index,
                finish_reason=reason,
                choice=request.choice,
            )
        entry = request.logprobs[index] if request.logprobs is not None else None
        return Token(
            id=request.output[index],
            text=shown,
            index=index,
            logprob=None if entry is None else entry.logprob,
            top_logprobs=None if entry is None else entry.top,
            finish_reason=reason,
            prompt_logprobs=_frozen(request.prompt_logprobs) if index == 0 else None,
            choice=request.choice,
        )

    def _text(self, request: Request) -> _LazyText:
        text = self._texts.get(request.choice)
        if text is None:
            text = self._texts[request.choice] = _LazyText(request, self._make_detokenizer)
        return text

    def _resume_reading(self) -> None:
        if self._grace is not None:
            self._grace.cancel()
            self._grace = None

    def _forget_grace(self) -> None:
        """Nobody will read on: the timer would only keep the answer alive. From any thread."""
        grace, self._grace = self._grace, None
        if grace is not None:
            self._answer.inbox.tell(grace.cancel)

    async def _wait(self, *, whole: bool = False) -> None:
        """Until something may be new (``whole``: until something has ended).

        A cancelled wait arms the grace, and loses nothing.
        """
        loop, reader = self._loop, self._answer.reader
        if asyncio.get_running_loop() is not loop:
            raise WrongEventLoop("a stream is read on the event loop that opened its engine")
        if reader.waiter is not None:
            raise AioschedError("another task is reading this stream")
        waiter = reader.waiter = loop.create_future()
        reader.whole = whole
        try:
            await waiter
        except asyncio.CancelledError:
            # The timer holds the answer, not the stream: dropping the stream still aborts at once.
            self._grace = loop.call_later(self._reader_grace, self._answer.abort)
            del self  # see __anext__
            raise
        finally:
            if reader.waiter is waiter:
                reader.waiter = None


class _LazyText:
    """Text of one choice, made when it is read (with stop strings: when it was committed)."""

    __slots__ = ("_detokenizer", "_flushed", "_request")

    def __init__(self, request: Request, make_detokenizer: MakeDetokenizer) -> None:
        self._request = request
        self._flushed = False
        self._detokenizer = (
            make_detokenizer(request.params.skip_special_tokens) if request.texts is None else None
        )

    def at(self, index: int) -> str:
        """Text of the token at ``index``; to be asked for each index once, in order."""
        request = self._request
        if request.texts is not None:
            return request.texts[index]
        if self._detokenizer is None:
            return ""
        if (
            request.finish_reason is FinishReason.STOP
            and index + 1 == len(request.output)
            and request.stopped_by_token
            and not request.params.include_stop
        ):
            return ""
        return self._detokenizer.push(request.output[index])

    def tail(self) -> str:
        """What was held back, once the answer has ended. Nothing the second time."""
        if self._flushed:
            return ""
        self._flushed = True
        if self._request.text_pipe is not None:
            return self._request.text_pipe.flush()
        return self._detokenizer.flush() if self._detokenizer is not None else ""


def _frozen(items: list[Logprob] | None) -> tuple[Logprob, ...] | None:
    return None if items is None else tuple(items)
