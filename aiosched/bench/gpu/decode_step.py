"""Decode steps built by hand, for what runs a model without an engine."""

from __future__ import annotations

import numpy as np
import torch

from aiosched.model.inputs import DeviceInputs, StepInputs


def decode_step(batch: int, length: int, page_size: int) -> StepInputs:
    """Each of ``batch`` sequences appends one token to ``length - 1``; pages in order."""
    width = -(-length // page_size)
    tables = np.arange(1, batch * width + 1, dtype=np.int32).reshape(batch, width)
    last = length - 1
    every = np.arange(batch, dtype=np.int64)
    return StepInputs(
        step=1,
        page_size=page_size,
        num_decodes=batch,
        rows=every + 1,
        generations=np.zeros(batch, np.int64),
        query_start=np.arange(batch + 1, dtype=np.int32),
        seq_lens=np.full(batch, length, np.int32),
        page_tables=tables,
        input_ids=every % 97,
        positions=np.full(batch, last, np.int64),
        slots=tables[:, last // page_size].astype(np.int64) * page_size + last % page_size,
        logits_index=every,
        sample_sequence=every,
    )


def extend_step(lengths: list[int], page_size: int) -> StepInputs:
    """Each sequence reads in all of its tokens; logits are asked for at the last of each."""
    width = max(-(-length // page_size) for length in lengths)
    tables = np.arange(1, len(lengths) * width + 1, dtype=np.int32).reshape(-1, width)
    positions = np.concatenate([np.arange(length) for length in lengths])
    owner = np.repeat(np.arange(len(lengths)), lengths)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    return StepInputs(
        step=1,
        page_size=page_size,
        num_decodes=0,
        rows=np.arange(1, len(lengths) + 1),
        generations=np.zeros(len(lengths), np.int64),
        query_start=starts.astype(np.int32),
        seq_lens=np.array(lengths, np.int32),
        page_tables=tables,
        input_ids=(positions * 7 + owner * 13) % 97,
        positions=positions,
        slots=tables[owner, positions // page_size].astype(np.int64) * page_size
        + positions % page_size,
        logits_index=starts[1:] - 1,
        sample_sequence=np.arange(len(lengths)),
    )


def on_device(step: StepInputs, device: str) -> DeviceInputs:
    """The step with its arrays as tensors on ``device``."""

    def tensor(values: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> torch.Tensor:
        return torch.from_numpy(values).to(device)

    return DeviceInputs(
        host=step,
        input_ids=tensor(step.input_ids),
        positions=tensor(step.positions),
        slots=tensor(step.slots),
        page_tables=tensor(step.page_tables),
        seq_lens=tensor(step.seq_lens),
        query_start=tensor(step.query_start),
        logits_index=tensor(step.logits_index),
    )
