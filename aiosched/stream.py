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
from collections import deque
from collections.abc import Generator
from types import TracebackType
from typing import Self

from aiosched.answer import Answer
from aiosched.choice_reader import ChoiceReader, MakeDetokenizer, frozen, whole_choice
from aiosched.errors import AioschedError, WrongEventLoop
from aiosched.request import Choice, Completion, FinishReason, Token, Usage
from aiosched.scheduler.reader import Reader, coroutine_of_one_frame
from aiosched.scheduler.requests import Request, State
from aiosched.text.detokenizer import IncrementalDetokenizer, NoText

_DECODE, _FINISHED = State.DECODE, State.FINISHED


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
        self._reader = answer.reader
        self._quick: Request | None = None  # what __anext__ may read, and nothing else is to do
        self._detokenizer: IncrementalDetokenizer = NoText()
        self._choices: deque[ChoiceReader] | None = None  # those that are still read
        self._ended = False

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
        self._quick = None  # after it: see _take_the_quick_way
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

    @coroutine_of_one_frame
    def __anext__(self) -> Generator[Reader, None, Token]:
        """The path of each token of each stream. A lone choice that runs and wants nothing but ids
        and text takes what is written out here; whatever else there is to do is in ``_next``."""
        request = self._quick
        if request is not None:
            output = request.output
            if request.read >= len(output) and request.state is not _FINISHED:
                reader = self._reader
                if reader.busy:
                    reader.refuse()
                reader.busy = reader._asyncio_future_blocking = True
                try:
                    yield reader
                except BaseException as error:
                    self._waiting_failed(error)
                    del self  # else the traceback, and with it a dead task, would hold the stream
                    raise
                finally:
                    reader.busy = False
            # Looked at again, for a reader that should not be there may have read meanwhile. In any
            # other state, and once it is set aside, there is more to do than this.
            index = request.read
            if request.state is _DECODE and index < len(output) and self._quick is not None:
                request.read = index + 1
                token, detokenizer = output[index], self._detokenizer
                pieces = detokenizer.pieces
                text = pieces[token] if token < len(pieces) else None
                if not isinstance(text, str) or detokenizer.held:
                    text = detokenizer.push(token)
                return Token(id=token, text=text, index=index)
        rest = self._next().__await__()
        del self  # see above
        return (yield from rest)

    async def _next(self) -> Token:
        self._resume_reading()
        answer = self._answer
        while not answer.aborted:
            try:
                token = self._take()
            except AioschedError:
                answer.abort()  # the other choices
                raise
            if token is not None:
                return token
            if answer.error is not None:
                raise answer.error
            if self._ended:
                break
            try:
                await self._reader
            except BaseException as error:
                self._waiting_failed(error)
                del self  # see __anext__
                raise
        raise StopAsyncIteration

    def __await__(self) -> Generator[object, None, Completion]:
        return self._completion().__await__()

    async def _completion(self) -> Completion:
        self._resume_reading()
        answer = self._answer
        answer.read_without_limit()
        try:
            while not answer.finished and not answer.aborted:
                await self._wait_for_end()
        except asyncio.CancelledError:
            answer.read_with_limit()
            del self  # see __anext__
            raise
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
            choices=tuple(whole_choice(r, self._make_detokenizer) for r in answer.requests),
            usage=Usage(
                prompt_tokens=len(first.prompt),
                completion_tokens=sum(len(r.output) for r in answer.requests),
                cached_tokens=first.cached_tokens,
            ),
            prompt_logprobs=frozen(first.prompt_logprobs),
        )

    def _take(self) -> Token | None:
        """The next event of some choice, each in its turn."""
        choices = self._choices
        if choices is None:
            return self._begin()
        for _ in range(len(choices)):
            choice = choices[0]
            token = choice.next()
            choices.rotate(-1)
            if choice.ended:
                choices.remove(choice)
                self._ended = not choices
            if token is not None:
                if choice.may_resume:
                    self._answer.inbox.resume(choice.request)
                return token
        return None

    def _begin(self) -> Token | None:
        """The first look at an answer: are there choices yet?"""
        answer = self._answer
        if answer.requests:
            readers = [ChoiceReader(r, self._make_detokenizer) for r in answer.requests]
            self._choices = deque(readers)
            self._take_the_quick_way()
            return self._take()
        if answer.cut and not self._ended:
            self._ended = True
            return Token(id=None, text="", index=0, finish_reason=FinishReason.ABORT)
        return None

    def _take_the_quick_way(self) -> None:
        """From the next token on, if there is but one choice and it wants but ids and text."""
        choices = self._choices
        if choices is not None and len(choices) == 1 and choices[0].quick:
            self._detokenizer = choices[0].detokenizer or NoText()
            self._quick = choices[0].request
        if self._answer.aborted:  # by another thread, and looked at after it was set
            self._quick = None

    def _resume_reading(self) -> None:
        if self._grace is not None:
            self._grace.cancel()
            self._grace = None
            self._take_the_quick_way()

    def _forget_grace(self) -> None:
        """Nobody will read on: the timer would only keep the answer alive. From any thread."""
        grace, self._grace = self._grace, None
        if grace is not None:
            self._answer.inbox.tell(grace.cancel)

    def _waiting_failed(self, error: BaseException) -> None:
        """Nothing is lost; but if nobody comes back to read, the request ends.

        The timer holds the answer, not the stream: dropping the stream still aborts at once.

        Raises:
            WrongEventLoop: the task that waited runs on another loop, as asyncio has noticed.
        """
        if isinstance(error, asyncio.CancelledError):
            self._quick = None
            self._forget_grace()
            self._grace = self._loop.call_later(self._reader_grace, self._answer.abort)
        elif isinstance(error, Exception) and asyncio.get_running_loop() is not self._loop:
            raise WrongEventLoop(
                "a stream is read on the event loop that opened its engine"
            ) from None

    async def _wait_for_end(self) -> None:
        """Until some choice has ended: single tokens wake nobody."""
        reader = self._reader
        reader.whole = True
        try:
            await reader
        except BaseException as error:
            self._waiting_failed(error)
            del self  # see __anext__
            raise
        finally:
            reader.whole = False
