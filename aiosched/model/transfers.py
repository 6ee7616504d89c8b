"""Copies between host and device, for every kind of device."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeAlias

import torch
from numpy.typing import NDArray

from aiosched.device.stream import Device

Upload: TypeAlias = Callable[[NDArray[Any]], torch.Tensor]
"""Takes a host array to the device, on the stream that is current."""


class Transfers(Protocol):
    """Copies on the stream that is current."""

    def together(self) -> AbstractContextManager[Upload]:
        """A way to the device for arrays that travel as one when the block ends.

        The tensors may be read by work of the stream from then on. The arrays must not be written
        to afterwards.
        """

    def to_host(self, tensor: torch.Tensor) -> NDArray[Any]:
        """The tensor as an array, whose content is there once the stream has come to this point."""


class SharedMemory:
    """The device is the host: nothing is copied."""

    def together(self) -> AbstractContextManager[Upload]:
        return nullcontext(self._to_device)

    def _to_device(self, array: NDArray[Any]) -> torch.Tensor:
        # torch warns about arrays that must not be written to; it could not keep the promise.
        return torch.from_numpy(array if array.flags.writeable else array.copy())

    def to_host(self, tensor: torch.Tensor) -> NDArray[Any]:
        array: NDArray[Any] = tensor.numpy()
        return array


def transfers_of(device: Device) -> Transfers:
    """The way to copy to and from ``device``."""
    if torch.device(device.torch_device).type == "cpu":
        return SharedMemory()
    from aiosched.device.pinned import PinnedPool

    return PinnedPool(device.torch_device)
