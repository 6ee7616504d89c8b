"""ScheduleBatch: the frozen record of one step, and what runs it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from aiosched.device.stream import InFlight
from aiosched.model.inputs import StepInputs, StepResult
from aiosched.scheduler.cohort import Cohort
from aiosched.scheduler.requests import Request


class ForwardMode(Enum):
    """What a step computes."""

    DECODE = "decode"  # one token for each sequence
    EXTEND = "extend"  # prompts, or chunks of them
    MIXED = "mixed"  # both

    @property
    def is_extend(self) -> bool:
        return self is not ForwardMode.DECODE


@dataclass(frozen=True, slots=True, eq=False)
class ScheduleBatch:
    """Everything of one step. Sequences that decode stand first, then those that extend.

    Attributes:
        requests: ``[n]``, in the order of the sequences.
        sampled: those that sample a token: all that decode, and those whose prompt is complete with
            this step. ``inputs.sample_sequence`` says where they stand.
        releases: ``RowTable.releases`` when it was planned: if that is the same when its result is
            in, every row is still with whom it was for.
    """

    inputs: StepInputs
    mode: ForwardMode
    requests: tuple[Request, ...]
    sampled: Cohort
    releases: int

    @property
    def step(self) -> int:
        return self.inputs.step

    @property
    def is_extend_in_batch(self) -> bool:
        """Whether any rank reads prompts in this step; with one rank, whether this one does."""
        return self.mode.is_extend


class Launched(Protocol):
    """A step that was handed to the device."""

    @property
    def forward(self) -> InFlight[Any]:
        """The model's work; says how long the device took."""

    @property
    def result(self) -> InFlight[StepResult]:
        """The copy of its result to the host."""

    @property
    def memory(self) -> object:
        """What its streams write and the host reads with the result."""


class Runner(Protocol):
    """From a step's inputs to its result, on a device. ``ModelRunner`` is the usual one."""

    def launch(self, inputs: StepInputs) -> Launched:
        """Enqueue the step and return: its result is awaited as ``.result``."""
