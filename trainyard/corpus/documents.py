"""Reads documents from input files, by byte range.

A document is one line of a JSONL file (`.jsonl`, or `.json` with an object a line), one row of a
Parquet file, or a whole plain text file (`.txt`); JSONL and text may be compressed. A `ByteRange`
covers the documents that begin within some bytes of one file, so any number of readers can share a
large file and see each document once. Blank lines and empty texts are not documents. Every error
names file, line and byte. Knows nothing of tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Literal, Protocol

import numpy as np

from trainyard.corpus.formats.bounds import MAX_DOCUMENT_BYTES, too_large
from trainyard.corpus.formats.compression import BrokenError, Passing, contents
from trainyard.corpus.formats.inputs import check_inputs, split_name, split_ranges
from trainyard.corpus.formats.jsonl import Skim, json_rows
from trainyard.corpus.formats.parse import (
    FaultError,
    begins,
    check_record,
    columns,
    decode,
    excerpt,
    find_ids,
)
from trainyard.corpus.formats.records import (
    BadLine,
    ByteRange,
    Document,
    DocumentColumns,
    Record,
    Rows,
)
from trainyard.errors import DataError

__all__ = [
    "BadLine",
    "ByteRange",
    "Document",
    "DocumentColumns",
    "DocumentReader",
    "Record",
    "check_inputs",
    "locate",
    "split_name",
    "split_ranges",
]


class Splitter(Protocol):
    """Cuts a text into sentences; `sentences.SentenceSplitter` is one."""

    def split(self, text: str) -> list[str]:
        """The sentences of a text, in order."""


class DocumentReader:
    """The documents of a byte range. Iterate over it for single documents, or over `blocks()` for
    columns of them, which is several times as fast.

    `keys` name the texts, `id_key` the id of a document, if present. A document of more than
    `max_bytes` (of its line; of a row, its texts) is a bad line. A `splitter` cuts strings into
    sentences; a list of strings already is sentences.

    A bad line raises DataError with file, line, byte, the beginning of the line and `advice`; with
    `on_bad_line="skip"` it goes to `bad` instead. A compressed file, or a row group, that is
    truncated is one bad line; the documents before it are read. A file is always an error if it
    changes while it is read, lacks the column of a key, or is one JSON document over many lines.

    `passing` is shown the bytes of the file in the order in which they are read; not of Parquet,
    of which some columns are read."""

    def __init__(
        self,
        source: ByteRange,
        keys: Sequence[str],
        *,
        id_key: str | None = "id",
        on_bad_line: Literal["stop", "skip"] = "stop",
        splitter: Splitter | None = None,
        advice: str = "",
        max_bytes: int = MAX_DOCUMENT_BYTES,
        passing: Passing | None = None,
    ) -> None:
        self.source = source
        self.keys = tuple(keys)
        self.id_key = id_key
        self.on_bad_line = on_bad_line
        self._split = splitter.split if splitter else None
        self._max_bytes = max_bytes
        self._passing = passing
        self._advice = f"; {advice}" if advice else ""
        self.lines = 0
        """Lines (Parquet: rows) seen so far, including blank and bad ones."""
        self.bad: list[BadLine] = []
        """Bad lines seen so far; a caller that has recorded them may clear the list."""

    def __iter__(self) -> Iterator[Document]:
        """The documents, in order."""
        for block in self.blocks():
            yield from block.documents()

    def blocks(self) -> Iterator[DocumentColumns]:
        """The documents, about a megabyte of input at once; a long one comes nearly alone.

        Keeps no reference to a block, so that its user can free it."""
        self.lines, self.bad = 0, []
        for rows in self._rows():
            self.lines += rows.num_lines
            if rows.bad or rows.records:
                block = [self._block(rows)]
                if len(block[0]):
                    yield block.pop()

    def records(self) -> Iterator[Record]:
        """The JSON objects whole, with all their keys; of Parquet and plain text, the texts and the
        id. A list of strings under a key is a bad line."""
        for rows in self.rows():
            places = (rows.offsets.tolist(), rows.lengths.tolist(), rows.lines.tolist())
            yield from map(Record, *places, rows.records)

    def rows(self, skim: Skim | None = None) -> Iterator[Rows]:
        """The same, about a megabyte of input at once, after bad ones are left out. skim: takes
        lines of JSONL, which are left out too, and not counted."""
        self.lines, self.bad = 0, []
        for rows in self._rows(skim):
            self.lines += rows.num_lines
            try:
                found = columns(rows.records, self.keys, None)
            except FaultError:
                self._drop_faulty(rows)
                found = columns(rows.records, self.keys, None)
            if any(counts is not None for _, counts in found):
                self._drop_lists(rows)
            if rows.bad:
                self.refuse(sorted(rows.bad))
            yield rows

    def _drop_lists(self, rows: Rows) -> None:
        is_list = [any(isinstance(record[k], list) for k in self.keys) for record in rows.records]
        reason = f"a list of sentences under one of the keys {list(self.keys)}, not a string"
        for i in np.flatnonzero(is_list).tolist():
            place = int(rows.lines[i]), int(rows.offsets[i])
            rows.bad.append(BadLine(*place, reason, rows.excerpt(i)))
        self._keep(rows, np.flatnonzero(np.logical_not(is_list)).tolist())

    def _rows(self, skim: Skim | None = None) -> Iterator[Rows]:
        kind, compression = split_name(self.source.url)
        if kind == "jsonl":
            return json_rows(
                self.source, compression, self.keys, self._max_bytes, self._passing, skim
            )
        if kind == "text":
            return _text_rows(
                self.source.url, compression, self.keys, self._max_bytes, self._passing
            )
        from trainyard.corpus.formats.parquet import parquet_rows

        return parquet_rows(self.source, self.keys, self.id_key, self._max_bytes)

    def _block(self, rows: Rows) -> DocumentColumns:
        try:
            found = columns(rows.records, self.keys, None)
        except FaultError:
            self._drop_faulty(rows)
            found = columns(rows.records, self.keys, None)
        if rows.bad:
            self.refuse(sorted(rows.bad))
        rows.raw.clear()
        ids = find_ids(rows.records, self.id_key) if self.id_key is not None else None
        if self._split is not None:
            found = columns(rows.records, self.keys, self._split)
        rows.records.clear()
        texts, counts = zip(*found, strict=True)
        return DocumentColumns(rows.offsets, rows.lengths, rows.lines, ids, texts, counts)

    def _drop_faulty(self, rows: Rows) -> None:
        kept = []
        for i, record in enumerate(rows.records):
            try:
                check_record(record, self.keys)
                kept.append(i)
            except FaultError as fault:
                place = int(rows.lines[i]), int(rows.offsets[i])
                rows.bad.append(BadLine(*place, str(fault), rows.excerpt(i)))
        self._keep(rows, kept)

    @staticmethod
    def _keep(rows: Rows, kept: Sequence[int]) -> None:
        rows.records[:] = [rows.records[i] for i in kept]
        chosen = np.array(kept, np.int64)
        rows.offsets, rows.lengths = rows.offsets[chosen], rows.lengths[chosen]
        rows.lines = rows.lines[chosen]

    def refuse(self, bad: list[BadLine]) -> None:
        """Raise DataError for the first of these bad lines, or put them all into `bad`."""
        if self.on_bad_line == "stop":
            place = self.place(bad[0].line, bad[0].offset)
            raise DataError(f"{place}: {bad[0].reason}{begins(bad[0].excerpt)}{self._advice}")
        self.bad += bad

    def place(self, line: int, offset: int) -> str:
        """The place of a document or a bad line of this range, for error messages."""
        return locate(self.source.url, offset, self._row(line))

    def _row(self, line: int) -> int | None:
        if split_name(self.source.url)[0] != "parquet":
            return None
        from trainyard.corpus.formats.parquet import row_groups

        groups = row_groups(self.source.url)
        return line + sum(g.num_rows for g in groups if g.offset < self.source.start)


def locate(url: str, offset: int, row: int | None = None) -> str:
    """`FILE: line N (byte B)` for the document that begins at byte B; for Parquet its row, if
    known, and B is where its row group begins.

    Reads the file up to there, so use it only for errors."""
    kind, compression = split_name(url)
    if kind == "parquet":
        which = "a row" if row is None else f"row {row}"
        return f"{url}: {which} of the row group at byte {offset}"
    number, left = 1, offset
    if kind == "jsonl" and left:
        with closing(contents(url, compression)) as pieces:
            for piece in pieces:
                number += piece.count(b"\n", 0, left)
                left -= len(piece)
                if left <= 0:
                    break
    return f"{url}: line {number} (byte {offset})"


def _text_rows(
    url: str, compression: str, keys: Sequence[str], max_bytes: int, passing: Passing | None
) -> Iterator[Rows]:
    data = bytearray()
    record = {}
    bad = []
    try:
        for piece in contents(url, compression, passing=passing):
            data += piece
            if len(data) > max_bytes:
                raise FaultError(too_large(max_bytes, "the file, which is one document,"))
        record = dict.fromkeys(keys, decode(data))
    except BrokenError as error:
        reason = f"{error}; the whole text is lost, of which {len(data)} bytes could be read"
        bad.append(BadLine(1, 0, reason, excerpt(data)))
    except FaultError as fault:
        bad.append(BadLine(1, 0, str(fault), excerpt(data)))
    count = 1 if data and record else 0
    place = np.zeros(count, np.int64)
    length = np.full(count, len(data))
    del data
    if count or bad:
        yield Rows([record] * count, place, length, place + 1, 1, bad, lambda _: "", [])
