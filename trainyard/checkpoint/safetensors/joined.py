"""Joins pieces of a file into a stream that fills memory of any size."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

SMALL = 64 << 10
"""Bytes whose copy is too short to block other threads noticeably."""


class FilePiece(Protocol):
    """Bytes that can be copied into memory."""

    def __len__(self) -> int:
        """Number of bytes."""

    def put(self, begin: int, memory: memoryview) -> None:
        """Fill memory with the bytes from `begin` on."""


class Joined:
    """The `fill` argument of `OutputFile.append_filled`. Keeps one piece in memory."""

    def __init__(self, pieces: Iterable[memoryview | FilePiece]) -> None:
        self._pieces = iter(pieces)
        self._piece: memoryview | FilePiece = memoryview(b"")
        self._done = 0
        """Bytes of the current piece that were copied."""

    def fill(self, memory: memoryview) -> None:
        """Fill memory with the next bytes. StopIteration means a bug: there are too few."""
        while memory:
            if self._done == len(self._piece):
                self._piece = memoryview(b"")  # freed before the next one is made
                self._piece, self._done = next(self._pieces), 0
            length = min(len(memory), len(self._piece) - self._done)
            if isinstance(self._piece, memoryview):
                copy(self._piece[self._done : self._done + length], memory[:length])
            else:
                self._piece.put(self._done, memory[:length])
            memory, self._done = memory[length:], self._done + length


def copy(source: memoryview, target: memoryview) -> None:
    """Copy bytes between memories of equal size; a long copy releases Python's lock."""
    if len(source) <= SMALL:
        target[:] = source
        return
    import numpy as np  # takes 0.1 s: not needed for a header

    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
