"""Reading GGUF files: metadata and tensors.

Own code because a start must be quick: the readers at hand take seconds for the vocabulary alone,
where walking it takes a tenth of one. The format is described at
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from aiosched.errors import ModelLoadError
from aiosched.model.gguf_unpack import unpack

if TYPE_CHECKING:
    import torch

_STRING, _ARRAY = 8, 9
_SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))


class _Tensor(NamedTuple):
    shape: tuple[int, ...]  # slowest dimension first, as numpy has it
    ggml_type: int
    offset: int


class GGUFFile:
    """A GGUF file, its tensors mapped into memory rather than read.

    Attributes:
        metadata: keys to str, int, float, bool, or a list of one of these.
        tensors: names of the tensors.

    Raises:
        ModelLoadError: the file is missing, cut short, or not GGUF version 2 or 3.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._bytes = np.memmap(path, mode="r", dtype=np.uint8)
            cursor = _Cursor(self._bytes.data)
            if cursor.take(4) != b"GGUF":
                raise ModelLoadError(f"{path} is not a GGUF file")
            if (version := cursor.number("I")) not in (2, 3):
                raise ModelLoadError(f"{path} is GGUF version {version}; 2 and 3 can be read")
            tensor_count, key_count = cursor.number("Q"), cursor.number("Q")
            self.metadata: dict[str, Any] = {}
            for _ in range(key_count):
                key = cursor.string()
                self.metadata[key] = cursor.value(cursor.number("I"))
            self._tensors: dict[str, _Tensor] = {}
            for _ in range(tensor_count):
                name = cursor.string()
                dims = [cursor.number("Q") for _ in range(cursor.number("I"))]
                ggml_type, offset = cursor.number("I"), cursor.number("Q")
                self._tensors[name] = _Tensor(tuple(reversed(dims)), ggml_type, offset)
        except (OSError, ValueError, struct.error, KeyError) as error:
            raise ModelLoadError(f"{path} cannot be read as GGUF: {error}") from error
        alignment = self.metadata.get("general.alignment", 32)
        self._start = -(-cursor.position // alignment) * alignment
        self.tensors = tuple(self._tensors)

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", "unknown"))

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of the tensor ``name``, slowest dimension first."""
        return self._tensors[name].shape

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor ``name``, unpacked to float32 memory of its own."""
        shape, ggml_type, offset = self._tensors[name]
        try:
            return unpack(self._bytes[self._start + offset :], shape, ggml_type)
        except (ValueError, NotImplementedError) as error:
            raise ModelLoadError(f"{self.path}: tensor {name!r} cannot be read: {error}") from error


class _Cursor:
    """A place in the file that moves on as values are read."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self.position = 0

    def take(self, count: int) -> bytes:
        start = self.position
        if start + count > len(self._data):
            raise ValueError("it ends too early")
        self.position = start + count
        return bytes(self._data[start : self.position])

    def number(self, code: str) -> Any:
        (value,) = struct.unpack_from(f"<{code}", self._data, self.position)
        self.position += struct.calcsize(f"<{code}")
        return value

    def string(self) -> str:
        (length,) = struct.unpack_from("<Q", self._data, self.position)
        self.position += 8
        return self.take(length).decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.number(_SCALARS[kind])
        element, count = self.number("I"), self.number("Q")
        if element in _SCALARS:
            code = f"<{count}{_SCALARS[element]}"
            return list(struct.unpack(code, self.take(struct.calcsize(code))))
        return [self.value(element) for _ in range(count)]
