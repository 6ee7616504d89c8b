"""A trace: who asks when, for how much. One JSON object a line."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from aiosched.errors import AioschedError


class InvalidTrace(AioschedError, ValueError):
    """A trace that cannot be read; names the file and the line."""

    def __init__(self, path: str | Path, line: int, why: str) -> None:
        super().__init__(f"{path}, line {line}: {why}")
        self.line = line


class TraceRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One request of a trace.

    Attributes:
        arrival: seconds since the trace began.
        prompt_tokens: length of the prompt, the shared prefix included.
        output_tokens: length of the answer.
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
        if not (math.isfinite(self.arrival) and self.arrival >= 0):
            return f"arrival={self.arrival!r}: must be seconds from 0 on"
        if self.prompt_tokens < 1 or self.output_tokens < 1:
            return "prompt_tokens and output_tokens: must be at least 1"
        if not 0 <= self.prefix_tokens <= self.prompt_tokens:
            return f"prefix_tokens={self.prefix_tokens}: must be at most prompt_tokens"
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
