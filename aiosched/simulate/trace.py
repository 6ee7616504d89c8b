"""A trace: who asks when, for how much. One JSON object a line."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from aiosched.errors import AioschedError

MAX_ARRIVAL = 1e9
"""Seconds, some 30 years: a date as a number (seconds since 1970) is no arrival."""
MAX_TOKENS = 2**31 - 1
"""Of a prompt and of an answer: as many as a sequence can have."""

_NOT_UTF_8 = {
    codecs.BOM_UTF8: "begins with a byte order mark: save it as UTF-8 without one",
    codecs.BOM_UTF16_LE: "is UTF-16: save it as UTF-8",
    codecs.BOM_UTF16_BE: "is UTF-16: save it as UTF-8",
}


class InvalidTrace(AioschedError, ValueError):
    """A trace that cannot be read; names the file and the line."""

    def __init__(self, path: str | Path, line: int, why: str) -> None:
        super().__init__(f"{path}, line {line}: {why}")
        self.line = line


class TraceRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One request of a trace.

    Attributes:
        arrival: seconds since the trace began, at most ``MAX_ARRIVAL``.
        prompt_tokens: length of the prompt, the shared prefix included; at most ``MAX_TOKENS``.
        output_tokens: length of the answer, at most ``MAX_TOKENS``.
        prefix_id: requests with the same one begin with the same tokens.
        prefix_tokens: how many of the prompt's tokens those are.
    """

    arrival: float
    prompt_tokens: int
    output_tokens: int
    prefix_id: str | None = None
    prefix_tokens: int = 0

    def fault(self) -> str | None:
        """What is wrong with it, in words."""
        if not 0 <= self.arrival <= MAX_ARRIVAL:
            since = f"seconds since the trace began, in [0, {MAX_ARRIVAL:g}]"
            return f"arrival={self.arrival!r}: must be {since}"
        for field in ("prompt_tokens", "output_tokens"):
            if not 1 <= getattr(self, field) <= MAX_TOKENS:
                return f"{field}={getattr(self, field)}: must be in [1, {MAX_TOKENS}]"
        if not 0 <= self.prefix_tokens <= self.prompt_tokens:
            return f"prefix_tokens={self.prefix_tokens}: must be in [0, prompt_tokens]"
        if self.prefix_tokens and self.prefix_id is None:
            return "prefix_tokens without a prefix_id"
        return None


def read_trace(path: str | Path) -> list[TraceRequest]:
    """The requests of a JSONL file, ordered by arrival. Empty lines are skipped.

    Raises:
        InvalidTrace: a line is no request, or there is none.
        OSError: the file cannot be read.
    """
    requests: list[TraceRequest] = []
    decode = msgspec.json.Decoder(TraceRequest).decode
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, 1):
            for mark, why in _NOT_UTF_8.items():
                if number == 1 and line.startswith(mark):
                    raise InvalidTrace(path, number, f"the file {why}")
            if not line.strip():
                continue
            try:
                request = decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise InvalidTrace(path, number, str(error)) from None
            if (fault := request.fault()) is not None:
                raise InvalidTrace(path, number, fault)
            requests.append(request)
    if not requests:
        raise InvalidTrace(path, 1, "the trace is empty")
    return sorted(requests, key=lambda request: request.arrival)


def write_trace(path: str | Path, requests: Iterable[TraceRequest]) -> None:
    """Write what ``read_trace`` reads.

    Raises:
        OSError: the file cannot be written.
    """
    encode = msgspec.json.Encoder().encode
    with open(path, "wb") as out:
        out.writelines(encode(request) + b"\n" for request in requests)


def duration(requests: Sequence[TraceRequest]) -> float:
    """Seconds from the beginning of the trace to its last arrival."""
    return max(request.arrival for request in requests)
