"""Reads records from lines of JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from trainyard.corpus.formats.bounds import too_large
from trainyard.corpus.formats.compression import Passing
from trainyard.corpus.formats.lines import (
    BEGINNING,
    Lines,
    LongLine,
    TornError,
    data_blocks,
    lines_of,
)
from trainyard.corpus.formats.parse import begins, excerpt, parse_lines
from trainyard.corpus.formats.records import BadLine, ByteRange, Rows
from trainyard.errors import DataError

SPREAD = (
    "documents must be objects, one per line; `jq -c '.[]' IN > OUT.jsonl` converts an array, "
    "`jq -c . IN > OUT.jsonl` objects that are spread over lines"
)

Skim = Callable[[bytes], int]
"""Is shown consecutive lines without the last line feed. It returns how many they are if no one
needs to read them, and each is a document; 0 if they are to be read."""


def json_rows(
    source: ByteRange,
    compression: str,
    keys: Sequence[str],
    max_bytes: int,
    passing: Passing | None = None,
    skim: Skim | None = None,
) -> Iterator[Rows]:
    """The records of a range, about a megabyte of lines at once; a line of more than `max_bytes` is
    a bad line. passing: is shown the bytes as stored. What `skim` takes is left out."""
    first = 1
    looked = source.start > 0
    try:
        for offset, block in data_blocks(source, compression, max_bytes, passing):
            if skim and isinstance(block, bytes) and (count := skim(block)):
                looked = True
                first += count
                continue
            lines = lines_of(block)
            rows = _rows(offset, lines, first, keys, max_bytes)
            if not looked and (rows.bad or rows.records):
                looked = True
                _refuse_one_document(source.url, rows, first)
            first += len(lines)
            yield rows
    except TornError as torn:
        reason = f"{torn}; {torn.received} bytes of contents could be read, the rest is lost"
        bad = BadLine(first, torn.offset, reason, excerpt(torn.beginning))
        yield _no_rows(bad)


def _rows(offset: int, lines: Lines, first: int, keys: Sequence[str], max_bytes: int) -> Rows:
    faults: dict[int, str] = {}
    lengths = np.fromiter(map(len, lines), np.int64, len(lines))
    for i in np.flatnonzero(lengths > max_bytes):
        lines[i] = LongLine(lines[i][:BEGINNING])
    long = [i for i, line in enumerate(lines) if isinstance(line, LongLine)]
    faults |= dict.fromkeys(long, too_large(max_bytes))
    parsed = [b"" if i in faults else line for i, line in enumerate(lines)] if long else lines
    kept, records = parse_lines(parsed, keys, faults)
    offsets = offset + np.cumsum(lengths + 1) - (lengths + 1)
    bad = [
        BadLine(first + i, int(offsets[i]), reason, excerpt(lines[i]))
        for i, reason in faults.items()
    ]
    chosen = np.arange(len(lines)) if kept is None else np.array(kept, np.int64)
    return Rows(
        records,
        offsets[chosen],
        lengths[chosen],
        chosen + first,
        len(lines),
        bad,
        lambda i: excerpt(lines[chosen[i]]),
        lines,
        kept is None and not long,
    )


def _no_rows(bad: BadLine) -> Rows:
    nothing = np.empty(0, np.int64)
    return Rows([], nothing, nothing, nothing, 1, [bad], lambda _: "", [])


def _refuse_one_document(url: str, rows: Rows, first: int) -> None:
    """Raise DataError for a file that is one array, or whose objects are spread over lines, instead
    of many bad lines. The first line that is not blank decides."""
    bad = rows.bad[0] if rows.bad else None
    if bad is None or (rows.records and rows.lines[0] < bad.line):
        number, offset = int(rows.lines[0]), int(rows.offsets[0])
        refused = "a JSON array" if isinstance(rows.records[0], list) else ""
    else:
        number, offset = bad.line, bad.offset
        refused = _document_of(rows.raw[number - first])
    if refused:
        raise DataError(
            f"{url}: line {number} (byte {offset}) is {refused}: {SPREAD}"
            f"{begins(excerpt(rows.raw[number - first]))}"
        )


def _document_of(line: bytes | bytearray) -> str:
    """What a bad line is part of, if the file is not JSONL; otherwise empty."""
    if isinstance(line, LongLine):
        return "a JSON array" if line.lstrip().startswith(b"[") else ""
    ends = bytes(line[-16:]).rstrip()[-1:]
    return "a piece of a JSON document" if ends in (b",", b"[", b"{") else ""
