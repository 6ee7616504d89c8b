"""Pinned host memory for copies that the host does not wait for.

The source of a copy to the device and the target of a copy to the host belong to the device until
the copy's event has fired; a target belongs to its reader after that, for as long as the array
lives. A buffer is used again only when nobody has a claim on it.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

SMALLEST = 1024  # bytes
ALIGNMENT = 64  # bytes; of the arrays that share a buffer


class PinnedApi(Protocol):
    """What the pool needs of CUDA."""

    def empty(self, nbytes: int) -> torch.Tensor:
        """Page-locked host memory: uint8 ``[nbytes]``."""

    def new_event(self) -> Any:
        """An event with ``record()`` on the current stream, and ``query()``."""


class CudaMemory:
    """Page-locked memory and events of ``torch.cuda``."""

    def empty(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def new_event(self) -> Any:
        event: Any = torch.cuda.Event
        return event()


class _Lease:
    """The base of an array on a buffer. Every view of the array keeps it alive.

    (NumPy hangs a view on the object that owns the memory, not on the view it was taken from, so a
    weak reference to the array itself would miss its views.)
    """

    __slots__ = ("__array_interface__", "__weakref__", "_memory")

    def __init__(self, memory: torch.Tensor, nbytes: int) -> None:
        self._memory = memory
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": (nbytes,),
            "data": (memory.data_ptr(), False),
        }


class _Buffer:
    """Memory with an event as its fence."""

    def __init__(self, memory: torch.Tensor, event: Any) -> None:
        self.memory = memory
        self.bytes: NDArray[np.uint8] = memory.numpy()
        self.event = event
        self.filling = False
        self.copying = False
        self.lease: weakref.ref[_Lease] | None = None

    def free(self) -> bool:
        if self.filling:
            return False
        if self.lease is not None and self.lease() is not None:
            return False
        if self.copying:
            self.copying = not self.event.query()
        return not self.copying

    def lend(self, nbytes: int) -> NDArray[np.uint8]:
        """The first ``nbytes`` as an array; the buffer is not free while the array lives."""
        lease = _Lease(self.memory, nbytes)
        self.lease = weakref.ref(lease)
        return np.asarray(lease)

    def fence(self) -> None:
        """The copy was enqueued on the current stream: not free before it is done."""
        self.filling = False
        self.copying = True
        self.event.record()


class PinnedPool:
    """Copies between host and device over buffers that take turns.

    Buffers come in sizes of powers of two. The pool grows to what is in flight at once and keeps
    it, because page-locked memory is slow to get and getting it may stall the device.

    Used on the event loop only, inside work that is launched on a stream: copies go to the stream
    that is current.

    Args:
        device: of the tensors, as torch names it.
        api: where memory and events come from.
    """

    def __init__(self, device: str, api: PinnedApi | None = None) -> None:
        self._device = torch.device(device)
        self._api = CudaMemory() if api is None else api
        self._buffers: dict[int, list[_Buffer]] = {}  # by size, the least recently used first
        self._most_together = 0  # bytes

    @contextmanager
    def together(self) -> Iterator[Callable[[NDArray[Any]], torch.Tensor]]:
        """Gives a function that takes an array to the device: same content, shape and dtype.

        The arrays are read at once, travel when the block ends, and share one piece of device
        memory. Work on the current stream may read the tensors from then on. One copy takes all,
        unless they are more than ever before.
        """
        bundle = _Bundle(self._device, lambda nbytes: self._take(max(nbytes, self._most_together)))
        try:
            yield bundle.add
            bundle.send()
        finally:
            bundle.give_up()
        self._most_together = max(self._most_together, bundle.total)

    def to_host(self, tensor: torch.Tensor) -> NDArray[Any]:
        """An array with the tensor's shape and dtype, to be read once the copy has landed.

        Its memory is its own while it, or a view of it, is referenced.
        """
        nbytes = tensor.numel() * tensor.element_size()
        buffer = self._take(nbytes)
        target = _typed(buffer.memory[:nbytes], tensor.dtype, tensor.shape)
        array = buffer.lend(nbytes).view(_numpy_dtype(tensor.dtype)).reshape(tensor.shape)
        target.copy_(tensor, non_blocking=True)
        buffer.fence()
        return array

    def _take(self, nbytes: int) -> _Buffer:
        size = max(SMALLEST, 1 << (nbytes - 1).bit_length()) if nbytes else SMALLEST
        buffers = self._buffers.setdefault(size, [])
        for position, buffer in enumerate(buffers):
            if buffer.free():
                buffers.append(buffers.pop(position))
                return buffer
        buffers.append(_Buffer(self._api.empty(size), self._api.new_event()))
        return buffers[-1]


class _Bundle:
    """Arrays one behind the other in a buffer, and tensors at the same places on the device.

    What does not fit any more is sent, and the rest goes to a larger buffer.

    Attributes:
        total: bytes so far, as one buffer would hold them.
    """

    def __init__(self, device: torch.device, take: Callable[[int], _Buffer]) -> None:
        self.total = 0
        self._device = device
        self._take = take
        self._buffer: _Buffer | None = None
        self._on_device: torch.Tensor
        self._end = 0

    def add(self, array: NDArray[Any]) -> torch.Tensor:
        buffer = self._buffer
        begin = _aligned(self._end)
        if buffer is None or begin + array.nbytes > len(buffer.bytes):
            self.send()
            buffer, begin = self._begin(array.nbytes + self.total), 0
        place = slice(begin, begin + array.nbytes)
        np.copyto(buffer.bytes[place].view(array.dtype).reshape(array.shape), array)
        self.total += _aligned(array.nbytes)
        self._end = place.stop
        return _typed(self._on_device[place], _torch_dtype(array.dtype), array.shape)

    def send(self) -> None:
        """Enqueue the copy of what was added since the last one."""
        if self._buffer is not None:
            source = self._buffer.memory[: self._end]
            self._on_device[: self._end].copy_(source, non_blocking=True)
            self._buffer.fence()
            self._buffer = None

    def give_up(self) -> None:
        """Leave the buffer to others, if it was not sent."""
        if self._buffer is not None:
            self._buffer.filling = False

    def _begin(self, nbytes: int) -> _Buffer:
        buffer = self._buffer = self._take(nbytes)
        buffer.filling = True
        self._on_device = torch.empty(len(buffer.bytes), dtype=torch.uint8, device=self._device)
        self._end = 0
        return buffer


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _typed(memory: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return memory.view(dtype).view(shape)


@functools.cache
def _torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype


@functools.cache
def _numpy_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    return torch.empty(0, dtype=dtype).numpy().dtype
