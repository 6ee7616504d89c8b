"""ChoiceReader: the committed tokens of one choice, as events with text, when they are read."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from aiosched.request import Choice, FinishReason, Logprob, Token
from aiosched.scheduler.requests import Request
from aiosched.text.detokenizer import IncrementalDetokenizer

MakeDetokenizer = Callable[[bool], IncrementalDetokenizer | None]


class ChoiceReader:
    """Reads one choice from its first token to its last event.

    Text is made here, by whoever reads, and not by the scheduler's step; with stop strings it was
    needed at commit and is there already.

    Attributes:
        ended: its last event was given.
        quick: nothing but id and text is wanted: the event of a running request needs no look-ups.
        detokenizer: makes the text; ``None`` if there is no tokenizer, or text already.
    """

    __slots__ = ("_flushed", "detokenizer", "ended", "quick", "request")

    def __init__(self, request: Request, make_detokenizer: MakeDetokenizer) -> None:
        self.request = request
        self.ended = False
        self._flushed = False
        self.detokenizer = (
            make_detokenizer(request.params.skip_special_tokens) if request.texts is None else None
        )
        self.quick = (
            request.texts is None
            and request.logprobs is None
            and request.prompt_logprobs is None
            and request.choice == 0
        )

    def next(self) -> Token | None:
        """The next event, if there is one. Once for each token: it is read by being given.

        Raises:
            RequestFailed, EngineFailed, EngineClosed: after the last token, if the request ended
                by an error.
        """
        request = self.request
        index, output = request.read, request.output
        if index >= len(output):
            return self._last_event(index)
        reason = request.finish_reason
        if reason is FinishReason.ABORT:
            # After a cancel no token is seen, nor text from behind those that were passed over.
            request.read = len(output)
            self._flushed = True
            return self._last_event(len(output))
        request.read = index + 1
        return self._event(index)

    @property
    def may_resume(self) -> bool:
        """Whether its request was paused for unread tokens, and few enough are left."""
        request = self.request
        if not request.held_by_reader:
            return False
        return 2 * (len(request.output) - request.read) <= request.unread_limit

    def _event(self, index: int) -> Token:
        request = self.request
        shown = self._text(index)
        reason = None
        if index + 1 == len(request.output) and request.error is None:
            reason = request.finish_reason
            if reason is not None:
                self.ended = True
                shown += self._tail()
        entry = request.logprobs[index] if request.logprobs is not None else None
        return Token(
            id=request.output[index],
            text=shown,
            index=index,
            logprob=None if entry is None else entry.logprob,
            top_logprobs=None if entry is None else entry.top,
            finish_reason=reason,
            prompt_logprobs=frozen(request.prompt_logprobs) if index == 0 else None,
            choice=request.choice,
        )

    def _last_event(self, index: int) -> Token | None:
        """What comes after the last token was read: an error, or an end that brings no token."""
        request = self.request
        if self.ended or request.finish_reason is None:
            return None
        self.ended = True
        if request.error is not None:
            raise request.error
        return Token(
            id=None,
            text=self._tail(),
            index=index,
            finish_reason=request.finish_reason,
            choice=request.choice,
        )

    def _text(self, index: int) -> str:
        """Text of the token at ``index``."""
        request = self.request
        if request.texts is not None:
            return request.texts[index]
        if self.detokenizer is None or (index + 1 == len(request.output) and _hides_last(request)):
            return ""
        return self.detokenizer.push(request.output[index])

    def _tail(self) -> str:
        """What was held back, once the answer has ended. Nothing the second time."""
        if self._flushed:
            return ""
        self._flushed = True
        if self.request.text_pipe is not None:
            return self.request.text_pipe.flush()
        return "" if self.detokenizer is None else self.detokenizer.flush()


def whole_choice(request: Request, make_detokenizer: MakeDetokenizer) -> Choice:
    """A request that has ended, as one piece, whatever of it was read as a stream."""
    return Choice(
        index=request.choice,
        text=_whole_text(request, make_detokenizer),
        token_ids=tuple(request.output),
        finish_reason=request.finish_reason or FinishReason.ABORT,
        logprobs=frozen(request.logprobs),
    )


def frozen(items: Sequence[Logprob] | None) -> tuple[Logprob, ...] | None:
    """The log-probabilities so far, as what users get."""
    return None if items is None else tuple(items)


def _whole_text(request: Request, make_detokenizer: MakeDetokenizer) -> str:
    if request.texts is not None and request.text_pipe is not None:
        return "".join(request.texts) + request.text_pipe.flush()
    detokenizer = make_detokenizer(request.params.skip_special_tokens)
    if detokenizer is None:
        return ""
    ids = request.output[:-1] if _hides_last(request) else request.output
    return detokenizer.push_many(ids) + detokenizer.flush()


def _hides_last(request: Request) -> bool:
    """Whether the last token ended the answer and its text is not wanted."""
    return request.stopped_by_token and not request.params.include_stop
