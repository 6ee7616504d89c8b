"""What a made-up trace is to be like."""

from __future__ import annotations

import msgspec

from aiosched.errors import InvalidConfig
from aiosched.simulate.trace import MAX_ARRIVAL, MAX_TOKENS

KINDS = ("poisson", "bursty", "diurnal")

BURST = 8.0
"""Arrival rate within a burst, as a multiple of the mean rate."""
BURST_SHARE = 0.1
"""Share of the time that is burst. Between bursts requests come at a sixth part of the mean rate
or so: what is left of it."""

MAX_REQUESTS = 10_000_000
MAX_SEED = 2**63 - 1
LOWEST_RATE, HIGHEST_RATE = 1 / MAX_ARRIVAL, 1e9
SHORTEST_BURST = 1e-3
"""In mean times between requests. A generator passes through all bursts, and those that are much
shorter bring nobody."""
MAX_SWING = 0.999
"""Else a generator would wait for the end of a night in which nobody comes."""


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """What a generated trace is like.

    Attributes:
        kind: ``poisson``: arrivals that know nothing of each other. ``bursty``: Poisson arrivals
            whose rate jumps between a calm and a burst, ``BURST`` times the mean, that lasts
            ``burst_seconds`` on average, at least ``SHORTEST_BURST / rate``. ``diurnal``:
            a rate that swings once in ``period`` seconds between its low at the start and its high
            half a period later.
        rate: mean arrivals a second.
        prompt_tokens, output_tokens: least and most; uniform between, both included. A prompt's
            own part: the shared prefix comes on top.
        prefixes: how many different prefixes there are; 0: none.
        prefix_tokens: length of each.
        swing: of ``diurnal``: how far the rate leaves its mean, as a share of it, at most
            ``MAX_SWING``.
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
        self._within("rate", LOWEST_RATE, HIGHEST_RATE)
        self._within("requests", 1, MAX_REQUESTS)
        self._within("seed", 0, MAX_SEED)
        for field in ("prompt_tokens", "output_tokens"):
            low, high = getattr(self, field)
            if not 1 <= low <= high <= MAX_TOKENS:
                bound = f"LOW-HIGH with 1 <= LOW <= HIGH <= {MAX_TOKENS}"
                raise InvalidConfig(field, (low, high), bound)
        self._within("prefixes", 0, MAX_REQUESTS)
        longest = MAX_TOKENS - self.prompt_tokens[1]
        if self.prefixes and not 1 <= self.prefix_tokens <= longest:
            bound = f"in [1, {longest}]: a prompt has at most {MAX_TOKENS} tokens"
            raise InvalidConfig("prefix_tokens", self.prefix_tokens, bound)
        if not 0 < self.burst_seconds <= MAX_ARRIVAL:
            raise InvalidConfig("burst_seconds", self.burst_seconds, f"in (0, {MAX_ARRIVAL:g}]")
        if self.kind == "bursty" and self.burst_seconds * self.rate < SHORTEST_BURST:
            bound = f"at least {SHORTEST_BURST / self.rate:g}: {SHORTEST_BURST:g} / rate"
            raise InvalidConfig("burst_seconds", self.burst_seconds, bound)
        self._within("period", 1e-3, MAX_ARRIVAL)
        self._within("swing", 0, MAX_SWING)

    def _within(self, field: str, low: float, high: float) -> None:
        if not low <= getattr(self, field) <= high:
            raise InvalidConfig(field, getattr(self, field), f"in [{low}, {high}]")
