"""Sampler: from logits to tokens, all of ``SamplingParams``, on the device."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd, inf

import torch

from aiosched.model.drawing import DrawInputs, draw_tokens
from aiosched.model.logprobs import DeviceLogprobs, token_logprobs
from aiosched.model.tracking import BadWordInputs, DeviceReset, PenaltyInputs, TokenTracker

_BLOCK = 512  # logits whose maximum is looked for together


@dataclass(frozen=True, slots=True, eq=False)
class BiasInputs:
    """Entries to be added to the logits, ``b`` of them; -inf bans."""

    index: torch.Tensor  # int64 [b] into the step's m rows
    ids: torch.Tensor  # int64 [b]
    values: torch.Tensor  # float32 [b]


@dataclass(frozen=True, slots=True, eq=False)
class AllowedInputs:
    """Rows that may choose among some ids only: ``a`` rows, ``e`` ids over all of them."""

    index: torch.Tensor  # int64 [a] into the step's m rows
    entry: torch.Tensor  # int64 [e] into the a rows
    ids: torch.Tensor  # int64 [e]


@dataclass(frozen=True, slots=True, eq=False)
class MaskInputs:
    """Rows that may choose among the ids of a mask only, ``g`` of them."""

    index: torch.Tensor  # int64 [g] into the step's m rows
    bits: torch.Tensor  # int32 [g, ceil(vocab / 32)], as in ``inputs.TokenMasks``


@dataclass(frozen=True, slots=True, eq=False)
class DeviceSampling:
    """``inputs.SamplingInputs`` on the device, sorted by what has to be done.

    ``None`` means that no row of the step needs it; all ``None``: every row is plainly greedy.
    """

    resets: tuple[DeviceReset, ...] = ()
    tracked: torch.Tensor | None = None  # int64 [t] into the step's m rows
    penalties: PenaltyInputs | None = None
    bias: BiasInputs | None = None
    allowed: AllowedInputs | None = None
    bad_words: BadWordInputs | None = None
    masks: MaskInputs | None = None
    draw: DrawInputs | None = None
    logprob_index: torch.Tensor | None = None  # int64 [j] into the step's m rows
    num_top: int = 0

    @property
    def edits(self) -> bool:
        """Whether something changes logits before the choice."""
        parts = (self.penalties, self.bias, self.allowed, self.bad_words, self.masks)
        return any(part is not None for part in parts)


@dataclass(frozen=True, slots=True, eq=False)
class SampleOutput:
    """One token per row, and log-probabilities of the rows that asked."""

    tokens: torch.Tensor  # int64 [m]; -1: the row's logits were not numbers, or all were banned
    logprobs: DeviceLogprobs | None = None


class Sampler:
    """Samples the rows of a step, and remembers the tokens of those that look back at them.

    In this order: log-probabilities are taken from the untouched logits; then repetition,
    frequency and presence penalties, bias and bans, allowed ids, masks, bad words; then the choice,
    greedy (the lowest id of equals) or drawn (see ``drawing``). Steps for which no row asks are
    skipped, and nothing waits for the device.

    A row's outcome is the same to the bit whatever else is in the batch, on the CPU. On CUDA that
    holds for tokens; log-probabilities may differ in their last bit where the size of the
    vocabulary is not a multiple of four (torch sums unaligned rows in another order).

    Args:
        vocab_size: number of ids, at most 2**22.
        max_rows: the largest row that will be named.
        device: where the logits are, as torch names it.
    """

    def __init__(self, vocab_size: int, max_rows: int, device: str) -> None:
        self._tracker = TokenTracker(vocab_size, max_rows, device)
        # One look-up for eight ids: shifting the bits out of their words takes three times as long.
        octets = torch.arange(256, device=device)[:, None] >> torch.arange(8, device=device)
        self._unset_in_octet = (octets & 1) == 0

    def sample(
        self, logits: torch.Tensor, rows: torch.Tensor, inputs: DeviceSampling
    ) -> SampleOutput:
        """Choose a token for each row and remember those of tracked rows.

        Args:
            logits: float ``[m, vocab]`` of any precision; not modified.
            rows: int64 ``[m]``, the request row (``req_pool_index``) of each; no row twice.
            inputs: of these ``m`` rows. A row in ``tracked`` or with bad words needs a reset in
                this call or an earlier one.
        """
        for reset in inputs.resets:
            self._tracker.reset(reset)
        edited = self._edit(logits, rows, inputs) if inputs.edits else logits

        tokens = _argmax(edited)
        peak = edited.gather(1, tokens[:, None])  # NaN if there is one in the row
        numbers = peak.isfinite().squeeze(1)
        if inputs.edits:  # which may have covered a NaN
            numbers = numbers & logits.amax(-1).isfinite()
        if (draw := inputs.draw) is not None:
            if draw.index is None:
                tokens = draw_tokens(edited, peak, draw)
            else:
                index = draw.index
                drawn = draw_tokens(
                    edited.index_select(0, index), peak.index_select(0, index), draw
                )
                tokens.index_copy_(0, index, drawn)
        tokens = torch.where(numbers, tokens, -1)

        if inputs.tracked is not None:
            tracked = inputs.tracked
            slots = self._tracker.slots(rows.index_select(0, tracked))
            self._tracker.append(slots, tokens.index_select(0, tracked))
        return SampleOutput(tokens, self._logprobs(logits, tokens, inputs))

    def _edit(
        self, logits: torch.Tensor, rows: torch.Tensor, inputs: DeviceSampling
    ) -> torch.Tensor:
        """A float32 copy of the logits after penalties, bias, allowed ids and bad words."""
        edited = logits.to(torch.float32, copy=True)
        if inputs.penalties is not None and (tracked := inputs.tracked) is not None:
            slots = self._tracker.slots(rows.index_select(0, tracked))
            part = self._tracker.penalize(edited.index_select(0, tracked), slots, inputs.penalties)
            edited.index_copy_(0, tracked, part)
        if (bias := inputs.bias) is not None:
            edited.index_put_((bias.index, bias.ids), bias.values, accumulate=True)
        if (allowed := inputs.allowed) is not None:
            part = edited.index_select(0, allowed.index)
            others = torch.ones_like(part, dtype=torch.bool)
            others[allowed.entry, allowed.ids] = False
            edited.index_copy_(0, allowed.index, part.masked_fill_(others, -inf))
        if (masks := inputs.masks) is not None:
            part = edited.index_select(0, masks.index)
            others = self._unset(masks.bits)[:, : part.shape[1]]
            edited.index_copy_(0, masks.index, part.masked_fill_(others, -inf))
        if (words := inputs.bad_words) is not None:
            slots = self._tracker.slots(rows.index_select(0, words.index))
            completes = self._tracker.completes(slots, words.prefix)
            ban = torch.zeros_like(completes, dtype=torch.float32).masked_fill_(completes, -inf)
            edited.index_put_((words.index, words.last), ban, accumulate=True)
        return edited

    def _unset(self, bits: torch.Tensor) -> torch.Tensor:
        """Bool ``[g, 32 * words]``: where a bit of int32 ``[g, words]`` is 0."""
        octets = bits.view(torch.uint8).flatten().int()
        return self._unset_in_octet.index_select(0, octets).view(len(bits), -1)

    def _logprobs(
        self, logits: torch.Tensor, tokens: torch.Tensor, inputs: DeviceSampling
    ) -> DeviceLogprobs | None:
        index = inputs.logprob_index
        if index is None:
            return None
        chosen = tokens.index_select(0, index)
        return token_logprobs(logits.index_select(0, index), chosen, inputs.num_top)


def _argmax(logits: torch.Tensor) -> torch.Tensor:
    """The lowest id of the largest logit, int64 ``[m]``; that of a NaN if the row has one."""
    m, vocab = logits.shape
    size = gcd(vocab, _BLOCK)
    if not logits.is_cpu or size == 1:
        return logits.argmax(-1)
    # torch's maximum is vectorised on the CPU and its search for the place is not: so the place is
    # sought among the maxima of blocks, then in one block. 6.7 → 0.8 ms for 32 rows in bfloat16.
    blocks = logits.reshape(m, vocab // size, size)
    best = blocks.amax(-1).argmax(-1)
    block = blocks.gather(1, best[:, None, None].expand(m, 1, size)).squeeze(1)
    return best * size + block.argmax(-1)
