"""Log-probabilities of tokens under the model's own distribution."""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Rows worked on at a time: prompt logprobs ask for thousands of rows of the vocabulary's width.
_BLOCK_ROWS = 64


@dataclass(frozen=True, slots=True, eq=False)
class DeviceLogprobs:
    """``inputs.Logprobs`` on the device."""

    chosen: torch.Tensor  # float32 [j]
    top_ids: torch.Tensor  # int32 [j, k]
    top: torch.Tensor  # float32 [j, k]


def token_logprobs(logits: torch.Tensor, tokens: torch.Tensor, num_top: int) -> DeviceLogprobs:
    """Log-probabilities of ``tokens`` and of the most likely alternatives, in float32.

    Alternatives stand in falling order, the lower id first where two are equal; so the first k of
    a row are the same whatever ``num_top`` is.

    Args:
        logits: float ``[j, vocab]``.
        tokens: int64 ``[j]``, one token of each row; a negative one is read as 0.
        num_top: alternatives per row, at most the vocabulary.
    """
    k = min(num_top, logits.shape[1])
    tokens = tokens.clamp(min=0)
    blocks = [
        _block(logits[start : start + _BLOCK_ROWS], tokens[start : start + _BLOCK_ROWS], k)
        for start in range(0, max(len(tokens), 1), _BLOCK_ROWS)
    ]
    if len(blocks) == 1:
        return blocks[0]
    return DeviceLogprobs(
        torch.cat([block.chosen for block in blocks]),
        torch.cat([block.top_ids for block in blocks]),
        torch.cat([block.top for block in blocks]),
    )


def _block(logits: torch.Tensor, tokens: torch.Tensor, k: int) -> DeviceLogprobs:
    logprobs = logits.float().log_softmax(-1)
    chosen = logprobs.gather(1, tokens[:, None]).squeeze(1)
    if k == 0:
        empty = chosen.new_empty((len(tokens), 0))
        return DeviceLogprobs(chosen, empty.int(), empty)
    top_ids = _rank_keys(logprobs).topk(k, dim=-1, largest=False).values & 0xFFFFFFFF
    return DeviceLogprobs(chosen, top_ids.int(), logprobs.gather(1, top_ids))


def _rank_keys(logprobs: torch.Tensor) -> torch.Tensor:
    """Distinct int64 keys that sort like (-logprob, id), the id in their lower half.

    ``topk`` leaves the order of equal values open, and logits of 16 bits are often equal. The bits
    of floats that are not negative sort like the floats.
    """
    keys = logprobs.abs().view(torch.int32).long()
    keys <<= 32
    keys += torch.arange(keys.shape[1], device=keys.device)
    return keys
