"""Numbers that are collected one by one and read back once, in order, in bounded memory.

Beyond some megabytes they go to a temporary file without a name, which the kernel removes with the
process, however that ends."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from typing import IO

import numpy as np
import numpy.typing as npt

from trainyard.corpus.layout import CHUNK, Tokens

LIMIT_BYTES = 4 << 20
"""Bytes buffered in memory before they are written to the file."""


class Spill:
    """An array that only grows. Not for several threads at once."""

    def __init__(self, dtype: npt.DTypeLike) -> None:
        self.dtype = np.dtype(dtype)
        self._held = bytearray()
        self._file: IO[bytes] | None = None
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def extend(self, values: npt.ArrayLike) -> None:
        """Append values that fit the type."""
        array = np.asarray(values, self.dtype)
        self._held += array.tobytes()
        self._count += len(array)
        if len(self._held) >= LIMIT_BYTES:
            if self._file is None:
                self._file = tempfile.TemporaryFile(prefix="trainyard-spill-")  # noqa: SIM115
            self._file.write(self._held)
            self._held.clear()

    def chunks(self) -> Iterator[Tokens]:
        """Everything, in order, some entries at a time; do not extend the array until the end."""
        size = CHUNK * self.dtype.itemsize
        if self._file is not None:
            self._file.seek(0)
            while piece := self._file.read(size):
                yield np.frombuffer(piece, self.dtype)
        for start in range(0, len(self._held), size):
            yield np.frombuffer(bytes(self._held[start : start + size]), self.dtype)
        if self._file is not None:
            self._file.seek(0, 2)
