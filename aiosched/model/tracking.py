"""What the sampler remembers of a row's tokens: counts for penalties, a tail for bad words.

It lives on the device and is updated in the same stream as sampling, so a penalty never lags
behind the tokens in flight.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from aiosched.params import MAX_BAD_WORD_TOKENS

TAIL = MAX_BAD_WORD_TOKENS - 1  # a word's last token is the one that gets banned


@dataclass(frozen=True, slots=True, eq=False)
class DeviceReset:
    """``inputs.TrackedReset`` on the device."""

    row: int
    prompt_ids: torch.Tensor  # int64 [p]
    output_ids: torch.Tensor  # int64 [o]
    tail: torch.Tensor  # int64 [TAIL], newest last; -1: none


@dataclass(frozen=True, slots=True, eq=False)
class PenaltyInputs:
    """Penalties of the ``t`` tracked rows; a ``None`` concerns none of them."""

    repetition: torch.Tensor | None  # float32 [t]; 1: off
    presence: torch.Tensor | None  # float32 [t]; 0: off
    frequency: torch.Tensor | None  # float32 [t]; 0: off


@dataclass(frozen=True, slots=True, eq=False)
class BadWordInputs:
    """Bad words of two and more tokens, ``w`` of them."""

    index: torch.Tensor  # int64 [w] into the step's m rows
    prefix: torch.Tensor  # int64 [w, TAIL], all tokens but the last, right-aligned; -1: any
    last: torch.Tensor  # int64 [w]


class TokenTracker:
    """Token counts and tails per row. All methods are device work and wait for nothing.

    A row gets a slot at its first reset and keeps it, so memory grows with the rows that were ever
    tracked (5 bytes times the vocabulary each). Slot 0 stands for rows that were never reset: it
    stays empty.
    """

    def __init__(self, vocab_size: int, max_rows: int, device: str) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._slot: dict[int, int] = {}
        self._slot_of_row = torch.zeros(max_rows + 1, dtype=torch.int64, device=device)
        self._outputs = torch.zeros((1, vocab_size), dtype=torch.int32, device=device)
        self._in_prompt = torch.zeros((1, vocab_size), dtype=torch.bool, device=device)
        self._tails = torch.full((1, TAIL), -1, dtype=torch.int64, device=device)

    def reset(self, reset: DeviceReset) -> None:
        """Replace what is known of ``reset.row``."""
        slot = self._slot_for(reset.row)
        self._in_prompt[slot].zero_().index_fill_(0, reset.prompt_ids, True)
        ones = torch.ones_like(reset.output_ids, dtype=torch.int32)
        self._outputs[slot].zero_().scatter_add_(0, reset.output_ids, ones)
        self._tails[slot].copy_(reset.tail)

    def slots(self, rows: torch.Tensor) -> torch.Tensor:
        """Slots int64 ``[t]`` of ``rows``."""
        return self._slot_of_row.index_select(0, rows)

    def penalize(
        self, logits: torch.Tensor, slots: torch.Tensor, penalties: PenaltyInputs
    ) -> torch.Tensor:
        """Float32 logits ``[t, vocab]`` after the penalties of the rows in ``slots``.

        Repetition (CTRL, Keskar et al. 2019) divides positive logits of tokens in the prompt or
        the output and multiplies negative ones. Frequency subtracts per occurrence in the output,
        presence once.
        """
        counts = self._outputs.index_select(0, slots)
        if penalties.repetition is not None:
            factor = penalties.repetition[:, None]
            seen = self._in_prompt.index_select(0, slots) | (counts > 0)
            damped = torch.where(logits > 0, logits / factor, logits * factor)
            logits = torch.where(seen, damped, logits)
        if penalties.frequency is not None:
            # A product of its own: fused with the subtraction it would round differently.
            logits = logits - penalties.frequency[:, None] * counts
        if penalties.presence is not None:
            logits = logits - penalties.presence[:, None] * (counts > 0)
        return logits

    def completes(self, slots: torch.Tensor, prefix: torch.Tensor) -> torch.Tensor:
        """Bool ``[w]``: whether the output of the row in each slot ends with the prefix."""
        tails = self._tails.index_select(0, slots)
        return ((tails == prefix) | (prefix < 0)).all(-1)

    def append(self, slots: torch.Tensor, tokens: torch.Tensor) -> None:
        """Remember ``tokens`` int64 ``[t]``, sampled just now; -1 (no token) is not counted."""
        tokens = torch.where(slots > 0, tokens, -1)
        counted = (tokens >= 0).int()
        self._outputs.index_put_((slots, tokens.clamp(min=0)), counted, accumulate=True)
        tails = self._tails.index_select(0, slots)
        tails = torch.cat([tails[:, 1:], tokens[:, None]], dim=1)
        self._tails.index_copy_(0, slots, tails)

    def _slot_for(self, row: int) -> int:
        slot = self._slot.get(row)
        if slot is None:
            slot = self._slot[row] = len(self._slot) + 1
            self._slot_of_row[row] = slot
            if slot >= len(self._tails):
                self._grow(2 * len(self._tails))
        return slot

    def _grow(self, slots: int) -> None:
        more = slots - len(self._tails)
        self._outputs = torch.cat(
            [self._outputs, self._outputs.new_zeros((more, self._vocab_size))]
        )
        self._in_prompt = torch.cat(
            [self._in_prompt, self._in_prompt.new_zeros((more, self._vocab_size))]
        )
        self._tails = torch.cat([self._tails, self._tails.new_full((more, TAIL), -1)])
