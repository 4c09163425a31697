"""Records of a corpus: byte ranges of files, documents, and bad lines.

Plain records; knows nothing of formats or stores."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

ORIGIN = "origin"
"""Key under which a document says where it was collected, once a stage has rewritten its file."""

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ByteRange:
    """The documents whose first byte is in [start, end) of one file: the unit of work.

    For Parquet, the documents of the row groups that begin there. A compressed file or a plain text
    is one range, the whole file as stored."""

    url: str
    start: int
    end: int

    @property
    def size_bytes(self) -> int:
        """Bytes of the file it covers, as stored."""
        return self.end - self.start


class Document(NamedTuple):
    """One document. A tuple rather than a dataclass: there may be hundreds of millions."""

    offset: int
    """Where it begins in the file after decompression; for Parquet, where its row group begins."""
    length: int
    """Its bytes there without the line feed; for Parquet, those of its row group."""
    line: int
    """From 1, counted from the first line (Parquet: row) of its range."""
    id: str | None
    """The value of the id key, as text."""
    values: tuple[tuple[str, ...], ...]
    """For each requested key, its sentences; a plain string is one sentence."""


class Record(NamedTuple):
    """A JSON object with all its keys, where a stage passes on more of a document than its text."""

    offset: int
    length: int
    line: int
    """As in `Document`."""
    fields: dict[str, Any]


class BadLine(NamedTuple):
    """A line, or a row, that could not be read as a document."""

    line: int
    """From 1, counted from the first line (Parquet: row) of its range."""
    offset: int
    """Where it begins; as `Document.offset`."""
    reason: str
    excerpt: str
    """Its beginning; empty for a part of a Parquet file."""


@dataclass(slots=True)
class DocumentColumns:
    """Consecutive documents as columns: the fields of `Document`, without a Python object each.

    The texts of document d under key k are the next `counts[k][d]` of `texts[k]`; if `counts[k]` is
    None, every document has exactly one."""

    offsets: Counts
    lengths: Counts
    lines: Counts
    ids: list[str | None] | None
    """None when no document of the block has one."""
    texts: tuple[list[str], ...]
    counts: tuple[list[int] | None, ...]

    def __len__(self) -> int:
        """The number of documents."""
        return len(self.offsets)

    def documents(self) -> Iterator[Document]:
        """The documents, one by one."""
        ids = self.ids or [None] * len(self)
        columns = [
            _grouped(texts, counts) for texts, counts in zip(self.texts, self.counts, strict=True)
        ]
        values = zip(*columns, strict=True)
        places = (self.offsets.tolist(), self.lengths.tolist(), self.lines.tolist())
        yield from map(Document, *places, ids, values)

    def only(self, chosen: Sequence[int]) -> DocumentColumns:
        """A block of only some documents. chosen: their numbers, ascending."""
        places = np.array(chosen, np.int64)
        ids = None if self.ids is None else [self.ids[d] for d in chosen]
        if ids is not None and all(one is None for one in ids):
            ids = None
        texts, counts = [], []
        for own, given in zip(self.texts, self.counts, strict=True):
            grouped = list(_grouped(own, given))
            kept = [grouped[d] for d in chosen]
            texts.append([text for group in kept for text in group])
            counts.append(None if given is None else [len(group) for group in kept])
        where = (self.offsets[places], self.lengths[places], self.lines[places])
        return DocumentColumns(*where, ids, tuple(texts), tuple(counts))


def _grouped(texts: list[str], counts: list[int] | None) -> Iterator[tuple[str, ...]]:
    if counts is None:
        yield from zip(texts, strict=True)
        return
    start = 0
    for count in counts:
        yield tuple(texts[start : start + count])
        start += count


@dataclass(slots=True)
class Rows:
    """What a format passes to the reader: consecutive records, not checked yet."""

    records: list[Any]
    """JSON objects, or lines that should be one."""
    offsets: Counts
    lengths: Counts
    lines: Counts
    """Of each record, as in `Document`."""
    num_lines: int
    """Lines, or rows, that were read for it, including those without a document."""
    bad: list[BadLine]
    """Lines that are not a record."""
    excerpt: Callable[[int], str]
    """Returns the beginning of record number i, for messages."""
    raw: list[bytes | bytearray]
    """The lines of the records, or []; cleared before they are processed, to free memory."""
    is_plain: bool = False
    """Whether every line is a record, read by orjson."""
