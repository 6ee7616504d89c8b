"""Copies between host and device, for every kind of device."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from numpy.typing import NDArray

from aiosched.device.stream import Device


class Transfers(Protocol):
    """Copies on the stream that is current."""

    def to_device(self, array: NDArray[Any]) -> torch.Tensor:
        """The array on the device. It must not be written to afterwards."""

    def to_host(self, tensor: torch.Tensor) -> NDArray[Any]:
        """The tensor as an array, whose content is there once the stream has come to this point."""


class SharedMemory:
    """The device is the host: nothing is copied."""

    def to_device(self, array: NDArray[Any]) -> torch.Tensor:
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
