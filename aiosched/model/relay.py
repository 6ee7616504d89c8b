"""The relay as a step uses it: sampled tokens pass to the next step without visiting the host."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from aiosched.device.stream import InFlight
from aiosched.model.inputs import DeviceInputs, Relay, StepResult

if TYPE_CHECKING:
    import torch


class StepRelay(Relay, Protocol):
    """The FutureMap, as the runner uses it: the device side, and where results are announced."""

    def expect(self, step: int, inflight: InFlight[StepResult]) -> None:
        """Keep ``inflight`` for whoever awaits the arrival of ``step``."""


@dataclass(frozen=True, slots=True, eq=False)
class RelayPayload:
    """What a step leaves for the next one, per row that sampled."""

    tokens: torch.Tensor  # int64 [m], ids of the vocabulary without exception

    @classmethod
    def of(cls, sampled: torch.Tensor, vocab_size: int) -> RelayPayload:
        """From the sampler's tokens. A row without one (-1) relays id 0: its request fails when
        the host sees the -1, and until then no placeholder may reach an embedding."""
        return cls(sampled.clamp(0, vocab_size - 1))


def resolve_forward_inputs(
    inputs: DeviceInputs,
    rows: torch.Tensor,
    generations: torch.Tensor,
    relay: Relay,
    vocab_size: int,
) -> DeviceInputs:
    """Fill the ids of the sequences that decode from the relay. Device work.

    Args:
        inputs: the step as staged; its first ids, one for each of ``rows``, are placeholders. Not
            modified: on the CPU they are the step's own host arrays.
        rows: int64 ``[num_decodes]``.
        generations: int64 ``[num_decodes]``, of the rows' owners.
        vocab_size: ids are clamped into it.
    """
    if not len(rows):
        return inputs
    input_ids = inputs.input_ids.clone()
    input_ids[: len(rows)] = relay.gather(rows, generations).clamp(0, vocab_size - 1)
    return replace(inputs, input_ids=input_ids)
