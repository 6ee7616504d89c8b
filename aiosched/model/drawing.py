"""Drawing tokens from filtered distributions, in integers.

Probabilities are cut off to multiples of 2**-40 of the likeliest token's. Sums of integers do not
depend on the order of addition, so a row's draw is the same to the bit in every batch and on every
path below, and a token of weight zero can never be drawn.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_PROBE = 1024  # leading values that are tried on the CPU before a whole row is sorted
_ONE = 2**40  # weight of the likeliest token; 2**22 tokens of this weight still fit an int64


@dataclass(frozen=True, slots=True, eq=False)
class CutInputs:
    """Rows with top_k or top_p."""

    index: torch.Tensor | None  # int64 [f] into the rows that draw; None: all of them
    top_k: torch.Tensor  # int64 [f], 1 … vocab; vocab: off
    top_p: torch.Tensor | None  # float32 [f]; 1: off; None: off for all
    widest_k: int  # the largest top_k that is on; 0: none
    open_ended: bool  # whether some row has a top_p but no top_k


@dataclass(frozen=True, slots=True, eq=False)
class DrawInputs:
    """Rows that draw; the others of the step are greedy."""

    index: torch.Tensor | None  # int64 [r] into the step's m rows; None: all of them
    temperature: torch.Tensor  # float32 [r], positive
    uniform: torch.Tensor  # float32 [r], in [0, 1)
    cut: CutInputs | None
    min_p: torch.Tensor | None  # float32 [r]; 0: off


def draw_tokens(logits: torch.Tensor, peak: torch.Tensor, inputs: DrawInputs) -> torch.Tensor:
    """Draw one token per row by the inverse of its cumulative distribution, in order of ids.

    Temperature first, then top_k, top_p and min_p, as transformers orders them: top_p's mass is
    that of what top_k left, and min_p compares with the likeliest token, which always stays.

    Args:
        logits: float ``[r, vocab]``, not modified.
        peak: float ``[r, 1]``, the largest of each row.
        inputs: of the ``r`` rows; ``inputs.index`` has been applied by the caller.

    Returns:
        int64 ``[r]`` in 0 … vocab - 1; without meaning where the peak is not finite.
    """
    # Peak first: x is at most 0 then, and a small temperature cannot overflow.
    x = (logits.float() - peak.float()) / inputs.temperature[:, None]
    ratio = x.exp()
    weights = (ratio * _ONE).long()
    cut = inputs.cut
    if cut is not None and cut.index is None:
        weights = _cut(x, weights, cut)
    elif cut is not None and cut.index is not None:
        rows = cut.index
        weights.index_copy_(
            0, rows, _cut(x.index_select(0, rows), weights.index_select(0, rows), cut)
        )
    if inputs.min_p is not None:
        weights.masked_fill_(ratio < inputs.min_p[:, None], 0)
    del x, ratio  # each is as large as the logits
    cdf = weights.cumsum(-1)
    total = cdf[:, -1:]
    target = (inputs.uniform.double()[:, None] * total).long()
    target = torch.minimum(target, total - 1)
    drawn = torch.searchsorted(cdf, target, right=True).squeeze(1)
    return drawn.clamp(max=logits.shape[1] - 1)


def _cut(x: torch.Tensor, weights: torch.Tensor, cut: CutInputs) -> torch.Tensor:
    """Weights ``[f, vocab]`` with those outside top_k and top_p set to zero.

    top_k keeps whatever equals the k-th largest. top_p keeps the smallest set whose mass reaches p,
    the token that crosses it included; of equal tokens at its edge the lower ids stay.
    """
    vocab = x.shape[1]
    if not cut.open_ended:
        return _cut_among(x, weights, cut, cut.widest_k)[0]
    if x.is_cpu and cut.widest_k <= _PROBE < vocab:
        # Most nuclei are small, and a sort takes far longer. Only the CPU can look at the outcome
        # without a wait.
        kept, found = _cut_among(x, weights, cut, _PROBE)
        if found.all():
            return kept
    return _cut_among(x, weights, cut, vocab)[0]


def _cut_among(
    x: torch.Tensor, weights: torch.Tensor, cut: CutInputs, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """``_cut``, looking for the edges among the ``width`` largest values of each row.

    Returns the weights that are kept, and bool ``[f, 1]``: whether the edge was there. A row with
    top_k has its edge within ``widest_k`` always.
    """
    # Selecting a large part of a row costs more than sorting it.
    leading = x.topk(width) if width * 8 <= x.shape[1] else x.sort(descending=True)
    values, order = leading.values[:, :width], leading.indices[:, :width]
    unlimited = cut.top_k[:, None] == x.shape[1]
    kth = values.gather(1, (cut.top_k[:, None] - 1).clamp(max=width - 1))
    kept = weights.masked_fill((x < kth) & ~unlimited, 0)
    if cut.top_p is None:
        return kept, torch.ones_like(unlimited)

    top_p = cut.top_p.double()[:, None]
    total = kept.sum(-1, keepdim=True)
    mass = torch.where(top_p < 1, (top_p * total).ceil().long(), total).clamp(min=1)
    cdf = kept.gather(1, order).cumsum(-1)
    # With top_k the mass may lie beyond the width too, but then in tokens that equal the k-th.
    found = (cdf[:, -1:] >= mass) | ~unlimited
    crossing = torch.searchsorted(cdf, mass).clamp(max=width - 1)
    edge = values.gather(1, crossing)
    edge_weight = kept.gather(1, order.gather(1, crossing)).clamp(min=1)
    above = kept.masked_fill(x <= edge, 0).sum(-1, keepdim=True)
    ties = (mass - above + edge_weight - 1) // edge_weight
    equal = x == edge
    surplus = equal & (equal.cumsum(-1, dtype=torch.int32) > ties)
    return kept.masked_fill_((x < edge) | surplus, 0), found
