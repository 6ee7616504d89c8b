"""StopTextPipe: from committed tokens to text that may be shown, with stop strings."""

from __future__ import annotations

from aiosched.params import SamplingParams
from aiosched.text.detokenizer import make_detokenizer
from aiosched.text.stop import StopMatcher
from aiosched.text.tokenizer import TokenizerLike


class StopTextPipe:
    """Text of one answer that has stop strings: detokenized as tokens are committed.

    Until ``min_tokens`` no stop string counts, nor does a part of one that ends later.
    """

    def __init__(self, tokenizer: TokenizerLike, params: SamplingParams) -> None:
        self._detokenizer = make_detokenizer(tokenizer, params.skip_special_tokens)
        self._matcher = StopMatcher(params.stop_strings, params.include_stop)
        self._unwatched = max(params.min_tokens - 1, 0)
        self._found = False
        self._tail: str | None = None

    def push(self, token: int) -> tuple[str, bool]:
        """The text that may be shown now, and whether a stop string is complete."""
        text = self._detokenizer.push(token)
        if self._unwatched > 0:
            self._unwatched -= 1
            return text, False
        shown, self._found = self._matcher.push(text)
        return shown, self._found

    def flush(self) -> str:
        """What was held back when the answer ended otherwise; the same each time it is asked for.

        A stream may be read to its end, and then awaited for the whole.
        """
        if self._tail is None:
            self._tail = "" if self._found else self._rest()
        return self._tail

    def _rest(self) -> str:
        shown, found = self._matcher.push(self._detokenizer.flush())
        return shown if found else shown + self._matcher.flush()
