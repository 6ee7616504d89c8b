"""Pinned host memory for copies that the host does not wait for.

The source of a copy to the device and the target of a copy to the host belong to the device until
the copy's event has fired; a target belongs to its reader after that, for as long as the array
lives. A buffer is used again only when nobody has a claim on it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import Any, Protocol, overload

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
        self.copying = False
        self.lease: weakref.ref[_Lease] | None = None

    def free(self) -> bool:
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

    @property
    def allocated_bytes(self) -> int:
        """Pinned bytes that the pool holds."""
        return sum(size * len(buffers) for size, buffers in self._buffers.items())

    @overload
    def to_device(self, arrays: NDArray[Any]) -> torch.Tensor: ...

    @overload
    def to_device(self, arrays: Mapping[str, NDArray[Any]]) -> dict[str, torch.Tensor]: ...

    def to_device(
        self, arrays: NDArray[Any] | Mapping[str, NDArray[Any]]
    ) -> torch.Tensor | dict[str, torch.Tensor]:
        """The same on the device, with shape and dtype, once the current stream has come so far.

        The arrays are read before this returns. Those of a mapping travel in one copy and share
        one piece of device memory.
        """
        if isinstance(arrays, Mapping):
            return self._upload(arrays)
        return self._upload({"": arrays})[""]

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

    def _upload(self, arrays: Mapping[str, NDArray[Any]]) -> dict[str, torch.Tensor]:
        places = dict(_places(arrays))
        end = max((place.stop for place in places.values()), default=0)
        buffer = self._take(end)
        for name, array in arrays.items():
            staged = buffer.bytes[places[name]].view(array.dtype).reshape(array.shape)
            np.copyto(staged, array)
        on_device = torch.empty(end, dtype=torch.uint8, device=self._device)
        on_device.copy_(buffer.memory[:end], non_blocking=True)
        buffer.fence()
        return {
            name: _typed(on_device[places[name]], _torch_dtype(array.dtype), array.shape)
            for name, array in arrays.items()
        }

    def _take(self, nbytes: int) -> _Buffer:
        size = max(SMALLEST, 1 << (nbytes - 1).bit_length()) if nbytes else SMALLEST
        buffers = self._buffers.setdefault(size, [])
        for position, buffer in enumerate(buffers):
            if buffer.free():
                buffers.append(buffers.pop(position))
                return buffer
        buffers.append(_Buffer(self._api.empty(size), self._api.new_event()))
        return buffers[-1]


def _places(arrays: Mapping[str, NDArray[Any]]) -> Iterator[tuple[str, slice]]:
    """Where each array lies in the buffer that they share, in bytes."""
    end = 0
    for name, array in arrays.items():
        begin = -(-end // ALIGNMENT) * ALIGNMENT
        end = begin + array.nbytes
        yield name, slice(begin, end)


def _typed(memory: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return memory.view(dtype).view(shape)


def _torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype


def _numpy_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    return torch.empty(0, dtype=dtype).numpy().dtype
