"""What one step hands to the model and gets back: frozen records of host arrays.

A step owns its arrays. They are filled once by the scheduler and never written again, so a copy to
the device may read them as late as it likes, and two steps in flight never see each other's data.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

IntArray = NDArray[np.int64]
Int32Array = NDArray[np.int32]
FloatArray = NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class TrackedReset:
    """A row got a new owner whose sampling looks back at its tokens: load them."""

    row: int
    prompt_ids: Int32Array
    output_ids: Int32Array


@dataclass(frozen=True, slots=True, eq=False)
class TokenMasks:
    """The ids that each of ``g`` rows may choose among: what its grammar can go on with."""

    index: IntArray  # [g] into the step's m rows
    bits: Int32Array  # [g, ceil(vocab / 32)]; bit i of word w is id 32 * w + i


@dataclass(frozen=True, slots=True, eq=False)
class SamplingInputs:
    """Sampling of ``m`` rows in one step. ``index`` below always counts within these ``m``.

    ``uniform`` is the draw of each row, in [0, 1): a function of (seed, position) alone, made on
    the host. A field that is ``None`` or empty concerns no row of this step.
    """

    temperature: FloatArray | None = None  # [m]; None: all rows are greedy; 0: this row is
    top_k: Int32Array | None = None  # [m]; 0: off
    top_p: FloatArray | None = None  # [m]; 1: off
    min_p: FloatArray | None = None  # [m]; 0: off
    uniform: FloatArray | None = None  # [m]
    repetition: FloatArray | None = None  # [m]; 1: off
    presence: FloatArray | None = None  # [m]; 0: off
    frequency: FloatArray | None = None  # [m]; 0: off
    resets: tuple[TrackedReset, ...] = ()
    tracked: IntArray | None = None  # [t] index of rows whose tokens the sampler remembers
    bias_index: IntArray | None = None  # [b] entries added to the logits
    bias_ids: IntArray | None = None  # [b]
    bias_values: FloatArray | None = None  # [b]; -inf bans
    allowed: tuple[tuple[int, IntArray], ...] = ()  # (index, the only ids allowed)
    bad_words: tuple[
        tuple[int, tuple[tuple[int, ...], ...]], ...
    ] = ()  # (index, words of >= 2 ids)
    masks: TokenMasks | None = None
    logprob_index: IntArray | None = None  # [j] rows that want log-probabilities
    num_top: int = 0  # most alternatives that any of them wants


@dataclass(frozen=True, slots=True, eq=False)
class PromptLogprobInputs:
    """Prompt positions of this step whose next token's log-probability is wanted."""

    logits_index: IntArray  # [q] into the step's tokens
    targets: IntArray  # [q] the prompt token that follows
    sequence: IntArray  # [q] which sequence of the batch
    num_top: int = 0


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class StepInputs:
    """One step: ``n`` sequences, ``t`` tokens, ``m`` of the sequences sample.

    Sequences that decode stand first and bring one token each; that token's id is in the relay
    under the sequence's row, and ``input_ids`` holds 0 in its place. ``page_tables`` is padded
    with page 0, which belongs to nobody.
    """

    step: int
    page_size: int
    num_decodes: int
    rows: IntArray  # [n] req_pool_index of each sequence; row 0 is padding
    generations: IntArray  # [n] generation of the row's owner
    query_start: Int32Array  # [n + 1] offsets of each sequence's tokens
    seq_lens: Int32Array  # [n] KV length when the step is done
    page_tables: Int32Array  # [n, pages]
    input_ids: IntArray  # [t]
    positions: IntArray  # [t]
    slots: IntArray  # [t] where each token's KV goes: page * page_size + offset
    logits_index: IntArray  # [m] into the step's tokens
    sample_sequence: IntArray  # [m] into the sequences
    sampling: SamplingInputs = field(default_factory=SamplingInputs)
    prompt_logprobs: PromptLogprobInputs | None = None

    @classmethod
    def empty(cls, page_size: int) -> StepInputs:
        """A step without sequences: the shapes alone, to warm a device up with."""
        none = np.empty(0, dtype=np.int64)
        return cls(
            step=0,
            page_size=page_size,
            num_decodes=0,
            rows=none,
            generations=none,
            query_start=np.zeros(1, dtype=np.int32),
            seq_lens=np.empty(0, dtype=np.int32),
            page_tables=np.empty((0, 1), dtype=np.int32),
            input_ids=none,
            positions=none,
            slots=none,
            logits_index=none,
            sample_sequence=none,
        )

    @property
    def num_sequences(self) -> int:
        return len(self.rows)

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)


@dataclass(frozen=True, slots=True, eq=False)
class Logprobs:
    """Log-probabilities of ``j`` tokens under the model's own distribution (before penalties,
    bias, temperature and filters), and of the ``k`` most likely ids at each place."""

    chosen: FloatArray  # [j]
    top_ids: Int32Array  # [j, k]
    top: FloatArray  # [j, k]


@dataclass(frozen=True, slots=True, eq=False)
class StepResult:
    """What a step computed, landed on the host."""

    tokens: IntArray  # [m]; -1 where the logits were not numbers
    logprobs: Logprobs | None = None  # rows of SamplingInputs.logprob_index
    prompt_logprobs: Logprobs | None = None  # rows of PromptLogprobInputs


@dataclass(frozen=True, slots=True, eq=False)
class DeviceInputs:
    """``StepInputs`` on the device, as a model sees them. Shapes as there.

    ``logits_index`` names every token whose logits are wanted, ``[m + q]``: the rows that sample,
    then the prompt positions of ``PromptLogprobInputs``. ``host`` is the same step on the host, for
    attention planners that work there.
    """

    host: StepInputs
    input_ids: torch.Tensor  # int64 [t], the relayed ones filled in
    positions: torch.Tensor  # int64 [t]
    slots: torch.Tensor  # int64 [t]
    page_tables: torch.Tensor  # int32 [n, pages]
    seq_lens: torch.Tensor  # int32 [n]
    query_start: torch.Tensor  # int32 [n + 1]
    logits_index: torch.Tensor  # int64 [m + q]


class Model(Protocol):
    """What the engine needs of a model. See docs/writing-a-model.md."""

    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]

    def kv_bytes_per_token(self) -> int:
        """Bytes of KV memory that one token takes over all layers."""

    def make_kv(self, num_pages: int, page_size: int) -> object:
        """A KV pool of ``num_pages + 1`` pages (page 0 is padding). One per engine."""

    def forward(self, inputs: DeviceInputs, kv: object) -> torch.Tensor:
        """Write the KV of every token and return logits ``[m + q, vocab_size]``, any float dtype.

        Runs as device work: on the CPU in the device's worker thread, on CUDA enqueued on the
        forward stream. Must not keep per-step data on ``self``.
        """


class Relay(Protocol):
    """The device side of the FutureMap, as the runner uses it (device work only)."""

    def gather(self, rows: torch.Tensor, generations: torch.Tensor) -> torch.Tensor:
        """Token ids ``[k]`` int64 last stashed for ``rows`` by the owners of ``generations``."""

    def stash(self, rows: torch.Tensor, generations: torch.Tensor, tokens: torch.Tensor) -> None:
        """Keep ``tokens`` [k] for the next step; a write of an older generation is dropped."""
