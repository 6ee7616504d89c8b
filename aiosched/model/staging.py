"""From a step's host arrays to the tensors that the model and the sampler read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from aiosched.model.drawing import CutInputs, DrawInputs
from aiosched.model.inputs import (
    DeviceInputs,
    FloatArray,
    IntArray,
    SamplingInputs,
    StepInputs,
    TrackedReset,
)
from aiosched.model.sampler import AllowedInputs, BiasInputs, DeviceSampling, MaskInputs
from aiosched.model.tracking import TAIL, BadWordInputs, DeviceReset, PenaltyInputs
from aiosched.model.transfers import Upload
from aiosched.params import MAX_BAD_WORD_TOKENS


@dataclass(frozen=True, slots=True, eq=False)
class StagedStep:
    """What the forward stream reads of one step."""

    inputs: DeviceInputs  # the relayed ids not filled in yet
    decode_rows: torch.Tensor  # int64 [num_decodes]
    decode_generations: torch.Tensor  # int64 [num_decodes]
    sample_rows: torch.Tensor  # int64 [m]
    sample_generations: torch.Tensor  # int64 [m]
    sampling: DeviceSampling
    prompt_targets: torch.Tensor | None  # int64 [q]


def stage_step(step: StepInputs, vocab_size: int, upload: Upload) -> StagedStep:
    """Upload one step. Called where the schedule stream is current."""
    prompt = step.prompt_logprobs
    wanted = step.logits_index
    if prompt is not None:
        wanted = np.concatenate([wanted, prompt.logits_index])
    decodes = slice(step.num_decodes)
    return StagedStep(
        inputs=DeviceInputs(
            host=step,
            input_ids=upload(step.input_ids),
            positions=upload(step.positions),
            slots=upload(step.slots),
            page_tables=upload(step.page_tables),
            seq_lens=upload(step.seq_lens),
            query_start=upload(step.query_start),
            logits_index=upload(wanted),
        ),
        decode_rows=upload(step.rows[decodes]),
        decode_generations=upload(step.generations[decodes]),
        sample_rows=upload(step.rows[step.sample_sequence]),
        sample_generations=upload(step.generations[step.sample_sequence]),
        sampling=stage_sampling(step.sampling, vocab_size, upload),
        prompt_targets=None if prompt is None else upload(prompt.targets),
    )


def stage_sampling(sampling: SamplingInputs, vocab_size: int, upload: Upload) -> DeviceSampling:
    """Sort out which rows need what, and upload that.

    Raises:
        ValueError: random rows come without ``uniform``, a bad word has fewer than 2 or more than
            ``MAX_BAD_WORD_TOKENS`` tokens, penalties name no ``tracked`` rows, or masks are not of
            this vocabulary.
    """
    return DeviceSampling(
        resets=tuple(_reset(reset, upload) for reset in sampling.resets),
        tracked=None if sampling.tracked is None else upload(sampling.tracked),
        penalties=_penalties(sampling, upload),
        bias=_bias(sampling, upload),
        allowed=_allowed(sampling.allowed, upload),
        bad_words=_bad_words(sampling, upload),
        masks=_masks(sampling, vocab_size, upload),
        draw=_draw(sampling, vocab_size, upload),
        logprob_index=None if sampling.logprob_index is None else upload(sampling.logprob_index),
        num_top=sampling.num_top,
    )


def _reset(reset: TrackedReset, upload: Upload) -> DeviceReset:
    tail = np.full(TAIL, -1, np.int64)
    newest = reset.output_ids[-TAIL:]
    tail[TAIL - len(newest) :] = newest
    return DeviceReset(
        row=reset.row,
        prompt_ids=upload(reset.prompt_ids.astype(np.int64)),
        output_ids=upload(reset.output_ids.astype(np.int64)),
        tail=upload(tail),
    )


def _penalties(sampling: SamplingInputs, upload: Upload) -> PenaltyInputs | None:
    arrays = (sampling.repetition, sampling.presence, sampling.frequency)
    if all(array is None for array in arrays):
        return None
    if (tracked := sampling.tracked) is None:
        raise ValueError("penalties look back at tokens: their rows must be tracked")
    return PenaltyInputs(*(None if array is None else upload(array[tracked]) for array in arrays))


def _bias(sampling: SamplingInputs, upload: Upload) -> BiasInputs | None:
    index, ids, values = sampling.bias_index, sampling.bias_ids, sampling.bias_values
    if index is None or ids is None or values is None or not len(index):
        return None
    return BiasInputs(upload(index), upload(ids), upload(values))


def _allowed(allowed: Sequence[tuple[int, IntArray]], upload: Upload) -> AllowedInputs | None:
    if not allowed:
        return None
    lists = [np.asarray(ids, np.int64) for _, ids in allowed]
    return AllowedInputs(
        index=upload(np.array([index for index, _ in allowed], np.int64)),
        entry=upload(np.repeat(np.arange(len(lists)), [len(ids) for ids in lists])),
        ids=upload(np.concatenate(lists)),
    )


def _bad_words(sampling: SamplingInputs, upload: Upload) -> BadWordInputs | None:
    words = [(index, word) for index, listed in sampling.bad_words for word in listed]
    if not words:
        return None
    prefix = np.full((len(words), TAIL), -1, np.int64)
    for line, (_, word) in zip(prefix, words, strict=True):
        if not 2 <= len(word) <= MAX_BAD_WORD_TOKENS:
            raise ValueError(f"bad word of {len(word)} tokens: 2 to {MAX_BAD_WORD_TOKENS} expected")
        line[TAIL + 1 - len(word) :] = word[:-1]
    return BadWordInputs(
        index=upload(np.array([index for index, _ in words], np.int64)),
        prefix=upload(prefix),
        last=upload(np.array([word[-1] for _, word in words], np.int64)),
    )


def _masks(sampling: SamplingInputs, vocab_size: int, upload: Upload) -> MaskInputs | None:
    masks = sampling.masks
    if masks is None or not len(masks.index):
        return None
    shape = (len(masks.index), -(-vocab_size // 32))
    if masks.bits.shape != shape:
        raise ValueError(f"token masks of shape {masks.bits.shape}: {shape} expected")
    return MaskInputs(upload(masks.index), upload(masks.bits))


def _draw(sampling: SamplingInputs, vocab_size: int, upload: Upload) -> DrawInputs | None:
    temperature = sampling.temperature
    if temperature is None:
        return None
    index = np.flatnonzero(temperature > 0)
    if not len(index):
        return None
    if sampling.uniform is None:
        raise ValueError("rows with a temperature need a uniform draw each")
    min_p = None if sampling.min_p is None else sampling.min_p[index]
    return DrawInputs(
        index=None if len(index) == len(temperature) else upload(index),
        temperature=upload(temperature[index]),
        uniform=upload(sampling.uniform[index]),
        cut=_cut(sampling, index, vocab_size, upload),
        min_p=upload(min_p) if min_p is not None and np.any(min_p > 0) else None,
    )


def _cut(
    sampling: SamplingInputs, index: IntArray, vocab_size: int, upload: Upload
) -> CutInputs | None:
    top_k = np.full(len(index), vocab_size, np.int64)
    if sampling.top_k is not None:
        given = sampling.top_k[index].astype(np.int64)
        top_k = np.where((given > 0) & (given < vocab_size), given, vocab_size)
    top_p: FloatArray = np.ones(len(index), np.float32)
    if sampling.top_p is not None:
        top_p = sampling.top_p[index]
    cut = np.flatnonzero((top_k < vocab_size) | (top_p < 1))
    if not len(cut):
        return None
    top_k, top_p = top_k[cut], top_p[cut]
    limited = top_k < vocab_size
    return CutInputs(
        index=None if len(cut) == len(index) else upload(cut),
        top_k=upload(top_k),
        top_p=upload(top_p) if np.any(top_p < 1) else None,
        widest_k=int(top_k[limited].max(initial=0)),
        open_ended=not np.all(limited),
    )
