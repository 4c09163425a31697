"""Pieces of a file that is to be written, one after another, into memory of any size."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

SMALL = 64 << 10
"""Bytes of which a copy is over before anybody waits for Python's lock."""


class FilePiece(Protocol):
    """Some bytes that can be put into memory."""

    def __len__(self) -> int:
        """How many."""

    def put(self, begin: int, memory: memoryview) -> None:
        """Those from `begin` on, as many as there is room for."""


class Joined:
    """What `OutputFile.append_filled` asks for. One piece is held at a time."""

    def __init__(self, pieces: Iterable[memoryview | FilePiece]) -> None:
        self._pieces = iter(pieces)
        self._piece: memoryview | FilePiece = memoryview(b"")
        self._done = 0
        """Bytes of it."""

    def fill(self, memory: memoryview) -> None:
        """Put the next bytes there; StopIteration is an error of ours: there are too few."""
        while memory:
            if self._done == len(self._piece):
                self._piece = memoryview(b"")  # not held while the next one is made
                self._piece, self._done = next(self._pieces), 0
            length = min(len(memory), len(self._piece) - self._done)
            if isinstance(self._piece, memoryview):
                copy(self._piece[self._done : self._done + length], memory[:length])
            else:
                self._piece.put(self._done, memory[:length])
            memory, self._done = memory[length:], self._done + length


def copy(source: memoryview, target: memoryview) -> None:
    """Copy bytes of equal number; where it lasts, Python's lock is left meanwhile."""
    if len(source) <= SMALL:
        target[:] = source
        return
    import numpy as np  # a tenth of a second: not for a header

    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
