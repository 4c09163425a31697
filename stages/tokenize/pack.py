"""The output of a unit of work: one object for each JSON key, so few calls of the store.

    bytes                   field
    summary["bin_bytes"]    the tokens, as in a .bin
    summary["idx_bytes"]    their index, as an .idx
    summary["docs_bytes"]   the origins of the documents, as a .docs (first key only)
    summary["bad_bytes"]    bad lines, a JSON document each (first key only)
    the rest                the summary, a JSON document
    8                       u64, little endian: size of the summary

The pack of the first key is written last: where it stands, the unit is finished."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from trainyard import json_text
from trainyard.corpus.layout import HEADER, ByteSink, Tokens
from trainyard.errors import ArtifactError

FOOTER = struct.Struct("<Q")

LOT_TOKENS = 1 << 20
"""Tokens handed on at once when a pack is read; a document may have more."""

LOT_DOCUMENTS = 1 << 16


@dataclass(slots=True)
class Summary:
    """Counts and sizes of a unit."""

    documents: int = 0
    sequences: int = 0
    tokens: int = 0
    validated: int = 0
    """Documents that were encoded by the reference too."""
    bad_lines: int = 0
    lines: list[int] = field(default_factory=list)
    """Lines seen in each of the unit's ranges."""
    digests: list[list[str]] = field(default_factory=list)
    """Of the blocks that begin in each range (`block_digest`); none where no share needs them."""
    dtype: str = ""
    bin_bytes: int = 0
    idx_bytes: int = 0
    docs_bytes: int = 0
    bad_bytes: int = 0

    def write(self, out: ByteSink) -> None:
        """The end of a pack."""
        document = json.dumps(asdict(self)).encode()
        out.write(document + FOOTER.pack(len(document)))


class Pack:
    """A pack on this machine, being read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("rb")
        self._size = path.stat().st_size
        self.summary = self._read_summary()

    def _read_summary(self) -> Summary:
        try:
            (length,) = FOOTER.unpack(self._read(self._size - FOOTER.size, FOOTER.size))
            start = self._size - FOOTER.size - length
            summary = Summary(**json_text.loads(self._read(start, length)))
        except (struct.error, ValueError, TypeError) as error:
            raise self._damaged() from error
        listed = summary.bin_bytes + summary.idx_bytes + summary.docs_bytes + summary.bad_bytes
        if listed != start:
            raise self._damaged()
        return summary

    def _damaged(self) -> ArtifactError:
        return ArtifactError(
            f"{self._path}: unfinished work of an earlier run is damaged; remove the folder that "
            "holds it and run again"
        )

    def _read(self, start: int, size: int) -> bytes:
        if start < 0:
            raise ValueError("before the beginning")
        self._file.seek(start)
        data = self._file.read(size)
        if len(data) != size:
            raise ValueError("cut short")
        return data

    def __enter__(self) -> Pack:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def lots(self) -> Iterator[tuple[Tokens, npt.NDArray[np.int32], npt.NDArray[np.int64]]]:
        """Tokens, lengths of sequences and sequences of each document, some documents at once."""
        lengths_at = self.summary.bin_bytes + HEADER.size
        bounds_at = lengths_at + 12 * self.summary.sequences
        token = 0
        for first in range(0, self.summary.documents, LOT_DOCUMENTS):
            count = min(LOT_DOCUMENTS, self.summary.documents - first)
            bounds = self._array("<i8", bounds_at + 8 * first, count + 1)
            sequences = int(bounds[-1] - bounds[0])
            lengths = self._array("<i4", lengths_at + 4 * int(bounds[0]), sequences)
            for a, b in _lots_of(lengths, bounds - bounds[0]):
                own = lengths[bounds[a] - bounds[0] : bounds[b] - bounds[0]]
                size = int(own.sum(dtype=np.int64))
                tokens = self._array(self.summary.dtype, self._itemsize * token, size)
                token += size
                yield tokens, own, np.diff(bounds[a : b + 1])

    @property
    def _itemsize(self) -> int:
        return np.dtype(self.summary.dtype).itemsize

    def _array(self, dtype: str, start: int, count: int) -> npt.NDArray[Any]:
        self._file.seek(start)
        return np.fromfile(self._file, dtype, count)

    def copy_origins(self, out: IO[bytes]) -> None:
        """The .docs of the unit."""
        start = self.summary.bin_bytes + self.summary.idx_bytes
        for piece in self._pieces(start, self.summary.docs_bytes):
            out.write(piece)

    def bad_lines(self) -> Iterator[dict[str, Any]]:
        """The bad lines of the unit, in order; `range` is the number of the range."""
        self._file.seek(self.summary.bin_bytes + self.summary.idx_bytes + self.summary.docs_bytes)
        for _ in range(self.summary.bad_lines):
            yield json_text.loads(self._file.readline())

    def _pieces(self, start: int, size: int) -> Iterator[bytes]:
        while size:
            piece = self._read(start, min(size, 1 << 20))
            start, size = start + len(piece), size - len(piece)
            yield piece


def _lots_of(
    lengths: npt.NDArray[np.int32], bounds: npt.NDArray[np.int64]
) -> Iterator[tuple[int, int]]:
    """Runs of documents [a, b) of about `LOT_TOKENS` tokens."""
    ends = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))[bounds]
    a, last = 0, len(bounds) - 1
    while a < last:
        b = max(a + 1, int(ends.searchsorted(ends[a] + LOT_TOKENS, side="right")) - 1)
        b = min(b, last)
        yield a, b
        a = b
