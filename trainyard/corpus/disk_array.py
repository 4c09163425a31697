"""Collects numbers one by one and reads them back once, in order, in bounded memory.

Beyond a few megabytes they go to a temporary file without a name. The kernel removes it when the
process ends, even if it is killed."""

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
    """An array that only grows; for one thread at a time."""

    def __init__(self, dtype: npt.DTypeLike) -> None:
        self.dtype = np.dtype(dtype)
        self._buffer = bytearray()
        self._file: IO[bytes] | None = None
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def extend(self, values: npt.ArrayLike) -> None:
        """Append values that fit the type."""
        array = np.asarray(values, self.dtype)
        self._buffer += array.tobytes()
        self._count += len(array)
        if len(self._buffer) >= LIMIT_BYTES:
            if self._file is None:
                self._file = tempfile.TemporaryFile(prefix="trainyard-spill-")  # noqa: SIM115
            self._file.write(self._buffer)
            self._buffer.clear()

    def chunks(self) -> Iterator[Tokens]:
        """All entries in order, CHUNK at a time; do not extend the array while reading."""
        size = CHUNK * self.dtype.itemsize
        if self._file is not None:
            self._file.seek(0)
            while piece := self._file.read(size):
                yield np.frombuffer(piece, self.dtype)
        for start in range(0, len(self._buffer), size):
            yield np.frombuffer(bytes(self._buffer[start : start + size]), self.dtype)
        if self._file is not None:
            self._file.seek(0, 2)
