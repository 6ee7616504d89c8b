"""Decode steps of a ``DenseModel`` in one call of compiled code.

The call lets go of the GIL from token ids to logits, so a busy event loop costs the step nothing
but its core. What a step reads lies in numpy arrays and tensors that live as long as the call.
"""

from __future__ import annotations

import ctypes

import torch

from aiosched.model.inputs import DeviceInputs
from aiosched.model.kv_pool import PagedKV
from aiosched.model.native import structs
from aiosched.model.native.teams import Teams


class NativeDecoder:
    """Runs decode steps, one at a time over all threads. Made by ``NativeBuilder``.

    Args:
        library: the compiled code.
        model: what it is to compute.
        memory: what ``model`` points at.
    """

    def __init__(
        self, library: ctypes.CDLL, model: structs.Model, memory: list[torch.Tensor]
    ) -> None:
        self._model = model
        self._memory = memory
        self._decode = library.aiosched_decode
        self._decode.argtypes = (ctypes.c_void_p,) * 3
        self._decode.restype = ctypes.c_int64
        self._scratch_floats = library.aiosched_scratch_floats
        self._scratch_floats.argtypes = (ctypes.c_void_p, *[ctypes.c_int64] * 3)
        self._scratch_floats.restype = ctypes.c_int64
        self._teams = Teams(library)

    def fits(self, inputs: DeviceInputs) -> bool:
        """Whether every sequence of the step decodes, and samples."""
        host = inputs.host
        count = host.num_sequences
        return (
            0 < count == host.num_decodes == len(host.sample_sequence)
            and host.prompt_logprobs is None
        )

    def forward(self, inputs: DeviceInputs, kv: PagedKV) -> torch.Tensor:
        """Logits float32 ``[n, vocab]`` of the ``n`` sequences.

        Raises:
            IndexError: a token or a position is outside of the model's.
            RuntimeError: there are no threads to run it.
        """
        model, batch, threads = self._model, inputs.host.num_sequences, torch.get_num_threads()
        longest = int(inputs.host.seq_lens.max())
        reference = ctypes.addressof(model)
        floats = self._scratch_floats(reference, batch, longest, threads)
        scratch = torch.empty(floats, dtype=torch.float32)
        logits = torch.empty(batch, model.vocab, dtype=torch.float32)
        tables = inputs.page_tables
        keys, values = _pointers(kv.keys), _pointers(kv.values)
        step = structs.Step(
            batch=batch,
            page_size=kv.page_size,
            table_stride=tables.stride(0),
            ids=inputs.input_ids.data_ptr(),
            positions=inputs.positions.data_ptr(),
            slots=inputs.slots.data_ptr(),
            tables=tables.data_ptr(),
            lengths=inputs.seq_lens.data_ptr(),
            keys=ctypes.addressof(keys),
            values=ctypes.addressof(values),
            scratch=scratch.data_ptr(),
            logits=logits.data_ptr(),
        )
        with self._teams.held(threads) as team:
            wrong = self._decode(reference, ctypes.addressof(step), team)
        if wrong >= 0:
            raise IndexError(
                f"sequence {wrong}: token {int(inputs.input_ids[wrong])} at position "
                f"{int(inputs.positions[wrong])} of a model of {model.vocab} tokens and "
                f"{model.positions} positions"
            )
        return logits


def _pointers(tensors: tuple[torch.Tensor, ...]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))
