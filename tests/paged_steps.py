"""Drives a ``Model`` without the engine: steps built by hand, pages in shuffled order."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import torch

from aiosched.model.inputs import DeviceInputs, Model, StepInputs


class PagedSequences:
    """Sequences of one KV pool.

    Args:
        num_pages: of the pool; page 0 comes on top.
    """

    def __init__(self, num_pages: int, page_size: int, seed: int = 0) -> None:
        self.page_size = page_size
        self._free = list(range(1, num_pages + 1))
        random.Random(seed).shuffle(self._free)
        self._pages: dict[str, list[int]] = {}
        self._lengths: dict[str, int] = {}
        self._step = 0

    def step(self, decodes: dict[str, int], extends: dict[str, Sequence[int]]) -> DeviceInputs:
        """The step that appends one token to each of ``decodes`` and several to ``extends``.

        Logits are asked for at each sequence's last token.
        """
        tokens = {**{name: [token] for name, token in decodes.items()}, **extends}
        input_ids, positions, slots, starts, lengths = [], [], [], [0], []
        for name, ids in tokens.items():
            pages = self._pages.setdefault(name, [])
            for token in ids:
                position = self._lengths.get(name, 0)
                if position // self.page_size == len(pages):
                    pages.append(self._free.pop())
                page = pages[position // self.page_size]
                input_ids.append(token)
                positions.append(position)
                slots.append(page * self.page_size + position % self.page_size)
                self._lengths[name] = position + 1
            starts.append(len(input_ids))
            lengths.append(self._lengths[name])
        width = max(len(self._pages[name]) for name in tokens)
        tables = [self._pages[name] + [0] * (width - len(self._pages[name])) for name in tokens]
        self._step += 1
        host = StepInputs(
            step=self._step,
            page_size=self.page_size,
            num_decodes=len(decodes),
            rows=np.arange(1, len(tokens) + 1),
            generations=np.zeros(len(tokens), np.int64),
            query_start=np.array(starts, np.int32),
            seq_lens=np.array(lengths, np.int32),
            page_tables=np.array(tables, np.int32),
            input_ids=np.array(input_ids, np.int64),
            positions=np.array(positions, np.int64),
            slots=np.array(slots, np.int64),
            logits_index=np.array(starts[1:], np.int64) - 1,
            sample_sequence=np.arange(len(tokens)),
        )
        return on_device(host)


def on_device(host: StepInputs) -> DeviceInputs:
    """The step with its arrays as CPU tensors."""
    return DeviceInputs(
        host=host,
        input_ids=torch.from_numpy(host.input_ids),
        positions=torch.from_numpy(host.positions),
        slots=torch.from_numpy(host.slots),
        page_tables=torch.from_numpy(host.page_tables),
        seq_lens=torch.from_numpy(host.seq_lens),
        query_start=torch.from_numpy(host.query_start),
        logits_index=torch.from_numpy(host.logits_index),
    )


def greedy(model: Model, prompt: Sequence[int], count: int, page_size: int = 16) -> list[int]:
    """``count`` greedy tokens after ``prompt``, from a pool of their own."""
    num_pages = -(-(len(prompt) + count) // page_size)
    kv = model.make_kv(num_pages, page_size)
    sequences = PagedSequences(num_pages, page_size)
    logits = model.forward(sequences.step({}, {"a": prompt}), kv)
    tokens = [int(logits[0].argmax())]
    while len(tokens) < count:
        logits = model.forward(sequences.step({"a": tokens[-1]}, {}), kv)
        tokens.append(int(logits[0].argmax()))
    return tokens
