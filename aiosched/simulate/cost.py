"""What a step costs, as a function of what is in it."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import msgspec
import numpy as np

from aiosched.errors import InvalidConfig
from aiosched.model.inputs import StepInputs


class StepShape(NamedTuple):
    """What of a step's inputs its time depends on.

    Attributes:
        decode_rows: sequences that decode, one token each.
        decode_kv: KV tokens that those read, over all of them.
        decode_kv_padded: the same if all were as long as the longest: what a batch that is
            padded reads.
        prefill_rows: sequences whose prompts it reads.
        prefill_tokens: tokens of those.
        prefill_pairs: pairs of a prompt token and a KV token that it looks at.
    """

    decode_rows: int
    decode_kv: int = 0
    decode_kv_padded: int = 0
    prefill_rows: int = 0
    prefill_tokens: int = 0
    prefill_pairs: int = 0

    @classmethod
    def of(cls, inputs: StepInputs) -> StepShape:
        """The shape of a step."""
        decodes = inputs.num_decodes
        lens = inputs.seq_lens
        kv = padded = rows = tokens = pairs = 0
        if decodes:
            decode_lens = lens[:decodes]
            kv, padded = int(decode_lens.sum()), decodes * int(decode_lens.max())
        if decodes < len(lens):
            queries = np.diff(inputs.query_start[decodes:]).astype(np.int64)
            rows, tokens = len(queries), int(queries.sum())
            # The last token of a chunk looks at all of its sequence, the one before at one less.
            pairs = int((queries * lens[decodes:] - queries * (queries - 1) // 2).sum())
        return cls(decodes, kv, padded, rows, tokens, pairs)


Curve: TypeAlias = tuple[tuple[int, float], ...]
"""Points (count, seconds), ascending: straight between them, and on beyond the last."""


class StepCost(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds of a step, the sum of what its parts cost.

    Attributes:
        rows: of a step that decodes so many sequences, KV apart. A curve, for a batch twice as
            large seldom takes twice as long.
        prompt_tokens: what is added where the step reads so many prompt tokens.
        decode_kv, decode_kv_padded, prefill_rows, prefill_pairs: for each of them.
    """

    rows: Curve
    prompt_tokens: Curve = ((1, 0.0),)
    decode_kv: float = 0.0
    decode_kv_padded: float = 0.0
    prefill_rows: float = 0.0
    prefill_pairs: float = 0.0

    def __post_init__(self) -> None:
        values = [getattr(self, field) for field in LINEAR]
        for curve in (self.rows, self.prompt_tokens):
            counts = [count for count, _ in curve]
            if not counts or counts != sorted(set(counts)):
                raise ValueError(f"{curve!r}: must be points whose counts ascend")
            values += [seconds for _, seconds in curve]
        if not all(0 <= value < math.inf for value in values):
            raise ValueError("seconds must be finite and at least 0")

    def seconds(self, shape: StepShape) -> float:
        """What a step of this shape costs."""
        seconds = interpolate(self.rows, shape.decode_rows) + (
            self.decode_kv * shape.decode_kv + self.decode_kv_padded * shape.decode_kv_padded
        )
        if shape.prefill_tokens:
            seconds += interpolate(self.prompt_tokens, shape.prefill_tokens) + (
                self.prefill_rows * shape.prefill_rows + self.prefill_pairs * shape.prefill_pairs
            )
        return seconds


LINEAR = ("decode_kv", "decode_kv_padded", "prefill_rows", "prefill_pairs")
"""The terms of a cost that are no curves."""


def weights(counts: Sequence[int], count: int) -> list[tuple[int, float]]:
    """The points of a curve with these ``counts`` that say what ``count`` costs, and their shares.

    Before the first point it costs as much as there; beyond the last, the line through the last
    two goes on.
    """
    if count <= counts[0] or len(counts) == 1:
        return [(0, 1.0)]
    right = min(bisect_left(counts, count), len(counts) - 1)
    share = (count - counts[right - 1]) / (counts[right] - counts[right - 1])
    return [(right - 1, 1.0 - share), (right, share)]


def interpolate(curve: Curve, count: int) -> float:
    """Seconds at ``count``. A falling curve does not fall below 0 beyond its end."""
    counts = [count for count, _ in curve]
    return max(0.0, sum(curve[i][1] * share for i, share in weights(counts, count)))


class Fit(msgspec.Struct, frozen=True, kw_only=True):
    """How well a cost agrees with the steps that it was fitted to.

    Attributes:
        steps: measured steps.
        mean_ms: their mean.
        error_median, error_p90: of a single step, as a share of what was measured.
    """

    steps: int
    mean_ms: float
    error_median: float
    error_p90: float


class Calibration(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A measured machine with a model: the file of ``aiosched bench calibrate``.

    Attributes:
        device: time from when the device can begin a step to when its result has landed.
        host: time from there to when its tokens are with their readers and the next step is
            launched.
        overlap_depth: of the engine that was measured.
        kv_tokens, max_model_len: of that engine; a simulation takes them if it is not told.
    """

    model: str
    dtype: str
    overlap_depth: int | str
    kv_tokens: int
    max_model_len: int
    machine: Mapping[str, Any]
    versions: Mapping[str, str]
    settings: Mapping[str, Any]
    device: StepCost
    host: StepCost
    device_fit: Fit
    host_fit: Fit

    @classmethod
    def read(cls, path: str | Path) -> Calibration:
        """What ``write`` wrote.

        Raises:
            InvalidConfig: it is no calibration.
            OSError: it cannot be read.
        """
        try:
            return msgspec.json.decode(Path(path).read_bytes(), type=cls)
        except msgspec.DecodeError as error:
            bound = f"a file that `aiosched bench calibrate` wrote: {error}"
            raise InvalidConfig("calibration", str(path), bound) from None

    def write(self, path: str | Path) -> None:
        """Raises ``OSError`` if the file cannot be written."""
        Path(path).write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n")

    @classmethod
    def recorded(cls) -> Calibration:
        """The one that comes with aiosched: its built-in model on a CPU of two cores."""
        return cls.read(Path(__file__).with_name("smollm2.json"))
