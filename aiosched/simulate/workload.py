"""What a made-up trace is to be like."""

from __future__ import annotations

import math

import msgspec

from aiosched.errors import InvalidConfig

KINDS = ("poisson", "bursty", "diurnal")

BURST = 8.0
"""Arrival rate within a burst, as a multiple of the mean rate."""
BURST_SHARE = 0.1
"""Share of the time that is burst. Between bursts requests come at a sixth part of the mean rate
or so: what is left of it."""


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """What a generated trace is like.

    Attributes:
        kind: ``poisson``: arrivals that know nothing of each other. ``bursty``: Poisson arrivals
            whose rate jumps between a calm and a burst, ``BURST`` times the mean, that lasts
            ``burst_seconds`` on average. ``diurnal``: a rate that swings once in ``period``
            seconds between its low at the start and its high half a period later.
        rate: mean arrivals a second.
        prompt_tokens, output_tokens: least and most; uniform between, both included. A prompt's
            own part: the shared prefix comes on top.
        prefixes: how many different prefixes there are; 0: none.
        prefix_tokens: length of each.
        swing: of ``diurnal``: how far the rate leaves its mean, as a share of it, below 1.
    """

    kind: str = "poisson"
    rate: float = 1.0
    requests: int = 1000
    seed: int = 0
    prompt_tokens: tuple[int, int] = (32, 512)
    output_tokens: tuple[int, int] = (16, 256)
    prefixes: int = 0
    prefix_tokens: int = 256
    burst_seconds: float = 5.0
    period: float = 86400.0
    swing: float = 0.8

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InvalidConfig("kind", self.kind, f"one of {', '.join(KINDS)}")
        for field in ("rate", "burst_seconds", "period"):
            if not 0 < getattr(self, field) < math.inf:
                raise InvalidConfig(field, getattr(self, field), "above 0")
        if self.requests < 1:
            raise InvalidConfig("requests", self.requests, "at least 1")
        if self.seed < 0:
            raise InvalidConfig("seed", self.seed, "at least 0")
        for field in ("prompt_tokens", "output_tokens"):
            low, high = getattr(self, field)
            if not 1 <= low <= high:
                raise InvalidConfig(field, (low, high), "LOW-HIGH with 1 <= LOW <= HIGH")
        if self.prefixes < 0 or (self.prefixes and self.prefix_tokens < 1):
            raise InvalidConfig("prefixes", self.prefixes, "0, or prefixes of at least one token")
        if not 0 <= self.swing < 1:
            raise InvalidConfig("swing", self.swing, "in [0, 1)")
