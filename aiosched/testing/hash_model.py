"""HashModel: a model whose every answer depends on every page, row, position and token.

It keeps a hash of each token and its position in the token's KV slot. The next token is a function
of the sum of the hashes in all slots that the sequence's page table names, so whatever an engine
gets wrong (a page of somebody else, a slot that was reused too early, a position off by one, a
relayed token of another row) changes what it says. ``oracle`` says in a few lines of plain
Python what it must answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

    from aiosched.model.inputs import DeviceInputs

_MASK = (1 << 62) - 1
_TOKEN = 0x2545F4914F6CDD1D & _MASK
_POSITION = 0x1B873593CC9E2D51 & _MASK
_SHIFT = 29


def _hash(token: int, position: int) -> int:
    value = ((token + 1) * _TOKEN + (position + 1) * _POSITION) & _MASK
    value ^= value >> _SHIFT
    value = (value * _TOKEN) & _MASK
    return value ^ (value >> _SHIFT)


def oracle_logits(tokens: Sequence[int], vocab_size: int) -> list[int]:
    """The logits of ``HashModel`` after ``tokens``, integers in [0, 1024)."""
    state = sum(_hash(token, i) for i, token in enumerate(tokens)) & _MASK
    return [(_hash(state & 0xFFFFFFFF, v) ^ (state >> 32)) >> 7 & 1023 for v in range(vocab_size)]


def oracle(
    prompt: Sequence[int],
    max_tokens: int,
    vocab_size: int = 64,
    stop: Callable[[int], bool] = lambda token: False,
) -> list[int]:
    """The greedy answer of ``HashModel`` to ``prompt``: the likeliest token, the lowest id first.

    Args:
        stop: whether a token ends the answer (it is the last of it then).
    """
    answer: list[int] = []
    while len(answer) < max_tokens and not (answer and stop(answer[-1])):
        logits = oracle_logits([*prompt, *answer], vocab_size)
        answer.append(logits.index(max(logits)))
    return answer


class HashModel:
    """A deterministic model of integers for tests; see the module.

    Args:
        vocab_size: at most 2**16.
        logit_scale: the logits are integers from 0 to 1023 times this. Small scales make sampling
            lively; greedy answers do not change.
        record: keep what was computed in ``seen``.
        faulty: gives logits that are not numbers to a sequence that ends with this token.

    Attributes:
        sampled: logits rows computed so far, by the row (``req_pool_index``) they were for.
        seen: with ``record``, a (row, position, token) for each token computed.
    """

    tokenizer = None

    def __init__(
        self,
        vocab_size: int = 64,
        *,
        max_model_len: int = 4096,
        eos_token_ids: tuple[int, ...] = (),
        logit_scale: float = 1 / 64,
        faulty: int | None = None,
        record: bool = False,
    ) -> None:
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.eos_token_ids = eos_token_ids
        self.logit_scale = logit_scale
        self.faulty = faulty
        self.record = record
        self.seen: list[tuple[int, int, int]] = []
        self.sampled: Counter[int] = Counter()

    def kv_bytes_per_token(self) -> int:
        return 8

    def make_kv(self, num_pages: int, page_size: int) -> torch.Tensor:
        """int64 ``[(num_pages + 1) * page_size]``, filled with what no token hashes to."""
        import torch

        return torch.full(((num_pages + 1) * page_size,), -1, dtype=torch.int64)

    def forward(self, inputs: DeviceInputs, kv: object) -> torch.Tensor:
        import torch

        assert isinstance(kv, torch.Tensor)
        host = inputs.host
        kv[inputs.slots] = _torch_hash(inputs.input_ids, inputs.positions)
        self.sampled.update(host.rows[host.sample_sequence].tolist())
        if self.record:
            rows = np.repeat(host.rows, np.diff(host.query_start)).tolist()
            tokens = inputs.input_ids.tolist()
            self.seen += zip(rows, host.positions.tolist(), tokens, strict=True)
        if not len(inputs.logits_index):
            return torch.zeros(0, self.vocab_size)
        # Each wanted token sees the slots of its own sequence up to its own position.
        starts = inputs.query_start[1:].to(torch.int64)
        owner = torch.searchsorted(starts, inputs.logits_index, right=True)
        last = inputs.positions[inputs.logits_index]
        places = torch.arange(int(last.max()) + 1)
        pages = inputs.page_tables[owner][:, places // host.page_size].to(torch.int64)
        slots = pages * host.page_size + places % host.page_size
        visible = places[None, :] <= last[:, None]
        state = torch.where(visible, kv[slots], 0).sum(1) & _MASK
        ids = torch.arange(self.vocab_size)
        mixed = _torch_hash((state & 0xFFFFFFFF)[:, None], ids[None, :]) ^ (state >> 32)[:, None]
        logits = (mixed >> 7 & 1023).to(torch.float32) * self.logit_scale
        if self.faulty is not None:
            wrong = inputs.input_ids[inputs.logits_index] == self.faulty
            logits[wrong] = float("nan")
        return logits


def _torch_hash(tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    # Products wrap modulo 2**64; masked to 62 bits they are what Python's integers give.
    value = ((tokens + 1) * _TOKEN + (positions + 1) * _POSITION) & _MASK
    value = value ^ (value >> _SHIFT)
    value = (value * _TOKEN) & _MASK
    return value ^ (value >> _SHIFT)
