"""Writes, reads and joins PREFIX.docs, which records the origin of every document.

`sidecar` has the layout. Documents have the same numbers as in the .idx beside it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, BinaryIO, NamedTuple

import numpy as np

from trainyard.artifacts import inputs, store
from trainyard.corpus.formats.records import DocumentColumns
from trainyard.corpus.layout import CHUNK, ByteSink
from trainyard.corpus.provenance.sidecar import (
    HEADER,
    LENGTH_BITS,
    MAX_LENGTH,
    MAX_SOURCES,
    RECORD,
    Array,
    Header,
    check_bounds,
    check_records,
    decode,
    parse_header,
    parse_names,
    write_names,
    write_repeated,
)
from trainyard.errors import ArtifactError, DataError

BUFFER_BYTES = 1 << 20
"""Bytes that a writer buffers of each part of the file before it uses a temporary file."""


class Origin(NamedTuple):
    """Where a document came from."""

    source: str
    """URL of the input file."""
    offset: int
    """Where it begins there after decompression; Parquet: where its row group begins."""
    length: int
    """Its bytes there; Parquet: those of its row group."""
    line: int
    """Its line, or row, from 1."""
    id: str | None


# --- writing ----------------------------------------------------------------------------------


class ProvenanceWriter:
    """Takes documents in order; memory grows only with the names of sources."""

    def __init__(self, scratch: Path | None = None) -> None:
        self._records, self._ids, self._id_ends = (_spool(scratch) for _ in range(3))
        self._sources: dict[str, int] = {}
        self._count = 0
        self._id_bytes = 0
        self._without_ids = 0  # documents before the first that has one
        self._has_ids = False

    def __len__(self) -> int:
        """Documents so far."""
        return self._count

    def add(self, source: str, offset: int, length: int, line: int, id: str | None = None) -> None:
        """One document."""
        offsets, lengths, lines = (np.array([n], np.int64) for n in (offset, length, line))
        self._add(source, offsets, lengths, lines, None if id is None else [id])

    def add_block(self, source: str, block: DocumentColumns) -> None:
        """The documents of a block that was read from `source`."""
        self._add(source, block.offsets, block.lengths, block.lines, block.ids)

    def _add(
        self,
        source: str,
        offsets: Array,
        lengths: Array,
        lines: Array,
        ids: Sequence[str | None] | None,
    ) -> None:
        if not len(offsets):
            return
        number = self._sources.setdefault(source, len(self._sources))
        if number >= MAX_SOURCES:
            raise DataError(
                f"{source} is source number {number}, but the format allows only {MAX_SOURCES}"
            )
        if lengths.max() > MAX_LENGTH:
            raise DataError(
                f"{source}: has a document of {lengths.max()} bytes, but the format allows only "
                f"{MAX_LENGTH}"
            )
        records = np.empty(len(offsets), RECORD)
        records["offset"], records["line"] = offsets, lines
        records["where"] = lengths.astype(np.uint64) | np.uint64(number << LENGTH_BITS)
        self._records.write(records.tobytes())
        self._add_ids(ids, len(offsets))
        self._count += len(offsets)

    def _add_ids(self, ids: Sequence[str | None] | None, count: int) -> None:
        if ids is None and not self._has_ids:
            self._without_ids += count
            return
        self._has_ids = True
        data = [(id or "").encode() for id in ids or [""] * count]
        ends = np.cumsum(np.fromiter(map(len, data), np.int64, count)) + self._id_bytes
        self._ids.write(b"".join(data))
        self._id_ends.write(ends.astype("<u8").tobytes())
        self._id_bytes = int(ends[-1])

    def write(self, out: ByteSink) -> None:
        """Write the whole file; call it once, at the end."""
        names = [name.encode() for name in self._sources]
        header = Header(
            self._has_ids, self._count, len(names), sum(map(len, names)), self._id_bytes
        )
        out.write(header.pack())
        _copy(self._records, out)
        write_names(names, out)
        if self._has_ids:
            write_repeated(0, 1 + self._without_ids, out)
            _copy(self._id_ends, out)
            _copy(self._ids, out)


def _spool(scratch: Path | None) -> IO[bytes]:
    folder = None if scratch is None else str(scratch)
    return tempfile.SpooledTemporaryFile(BUFFER_BYTES, prefix="docs-", dir=folder)


def _copy(spool: IO[bytes], out: ByteSink) -> None:
    with spool:
        spool.seek(0)
        shutil.copyfileobj(spool, out, store.CHUNK)


# --- reading ----------------------------------------------------------------------------------


class Provenance:
    """Reader of a sidecar, mapped into memory.

    A remote one is first copied to the folder `cache`, or to a temporary folder of this object."""

    def __init__(self, url: str, cache: Path | None = None) -> None:
        self.url, self.urls = url, [url]
        if cache is None and not store.is_local(url):
            self._temporary = tempfile.TemporaryDirectory(prefix="trainyard-docs-")
            cache = Path(self._temporary.name)
        path = inputs.fetch(url, cache or Path())
        size = path.stat().st_size
        with path.open("rb") as file:
            self._header = parse_header(file.read(HEADER.size), size, url)
        raw: Array = np.asarray(np.memmap(path, np.uint8, "r"))
        bounds, names, id_bounds, ids, _ = self._header.starts()
        self.records: Array = raw[HEADER.size : bounds].view(RECORD)
        """The records of the file; `sidecar` has their layout."""
        self.sources = parse_names(
            raw[bounds:names].view("<u8"), raw[names:id_bounds].tobytes(), url
        )
        """URLs of the input files."""
        self._id_bounds: Array = raw[id_bounds:ids].view("<u8")
        self._ids: Array = raw[ids:]

    def __len__(self) -> int:
        """The number of documents."""
        return self._header.num_documents

    @property
    def has_ids(self) -> bool:
        """Whether any document has an id."""
        return self._header.has_ids

    def __getitem__(self, k: int) -> Origin:
        """Where document k came from."""
        if not 0 <= k < len(self):
            raise IndexError(f"document {k} of {len(self)}")
        record = self.records[k : k + 1]
        check_records(record, self._header, k, self.url)
        where = int(record["where"][0])
        return Origin(
            self.sources[where >> LENGTH_BITS],
            int(record["offset"][0]),
            where & MAX_LENGTH,
            int(record["line"][0]),
            self._id(k),
        )

    def _id(self, k: int) -> str | None:
        if not self.has_ids:
            return None
        bounds = self._id_bounds[k : k + 2]
        check_bounds(bounds, 0, len(self._ids), f"{self.url}: ids of document {k}")
        data = self._ids[int(bounds[0]) : int(bounds[1])].tobytes()
        return decode(data, f"{self.url}: id of document {k}") or None

    def lines(self, documents: Array) -> Array:
        """(n,) the line of each document in its source, from 1."""
        found: Array = self.records["line"][documents]
        return found

    def source_numbers(self, start: int = 0, stop: int | None = None) -> Array:
        """(stop - start,) the number in `sources` of each document's source."""
        records = self.records[start:stop]
        check_records(records, self._header, start, self.url)
        numbers: Array = (records["where"] >> np.uint64(LENGTH_BITS)).astype(np.int64)
        return numbers

    def documents_of(self, source: str) -> Array:
        """(n,) the documents that came from a source, ascending; none for an unknown source."""
        if source not in self.sources:
            return np.empty(0, np.int64)
        number = self.sources.index(source)
        found = [
            start + np.flatnonzero(self.source_numbers(start, start + CHUNK) == number)
            for start in range(0, len(self), CHUNK)
        ]
        return np.concatenate([np.empty(0, np.int64), *found])

    def verify(self) -> None:
        """Read every entry; ArtifactError for the first damaged one."""
        for start in range(0, len(self), CHUNK):
            check_records(self.records[start : start + CHUNK], self._header, start, self.url)
            if self.has_ids:
                bounds = self._id_bounds[start : start + CHUNK + 1]
                check_bounds(bounds, 0, len(self._ids), f"{self.url}: ids")
                for k in range(start, min(start + CHUNK, len(self))):
                    self._id(k)
        if self.has_ids and (self._id_bounds[0] != 0 or self._id_bounds[-1] != len(self._ids)):
            raise ArtifactError(f"{self.url}: the ids do not fill their part of the file: damaged")


# --- joining ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SidecarPart:
    """A sidecar to be joined with others."""

    url: str
    line_shift: Mapping[str, int] = field(default_factory=dict)
    """By source, the number added to its line numbers: its lines before this part."""


@dataclass(slots=True)
class _Found:
    part: SidecarPart
    header: Header
    numbers: Array
    """Number of each of its sources in the whole."""
    shifts: Array


def join_provenance(
    parts: Sequence[SidecarPart], out: ByteSink, scratch: Path | None = None
) -> None:
    """Write the sidecar of all documents of the parts, in order, as one writer would have.

    It is a stream: memory grows only with the sources. Raises ArtifactError for a damaged part."""
    manifests = inputs.Manifests()
    for part in parts:
        inputs.check_listed(part.url, manifests)
    sources: dict[str, int] = {}
    found = [_look_at(part, sources) for part in parts]
    names = [name.encode() for name in sources]
    header = Header(
        any(f.header.has_ids for f in found),
        sum(f.header.num_documents for f in found),
        len(names),
        sum(map(len, names)),
        sum(f.header.id_bytes for f in found),
    )
    out.write(header.pack())
    for one in found:
        _join_records(one, out)
    write_names(names, out)
    if header.has_ids:
        write_repeated(0, 1, out)
        base = 0
        for one in found:
            _join_id_ends(one, base, out)
            base += one.header.id_bytes
        for one in found:
            with store.open_input(one.part.url) as file:
                for piece in _pieces(file, one.header.starts()[3], one.header.id_bytes, one):
                    out.write(piece)


def _look_at(part: SidecarPart, sources: dict[str, int]) -> _Found:
    size = store.info(part.url).size_bytes
    with store.open_input(part.url) as file:
        header = parse_header(file.read(HEADER.size), size, part.url)
        bounds_at, names_at, *_ = header.starts()
        file.seek(bounds_at)
        bounds = np.frombuffer(file.read(names_at - bounds_at), "<u8")
        names = parse_names(bounds, file.read(header.name_bytes), part.url)
    numbers = [sources.setdefault(name, len(sources)) for name in names]
    if len(sources) > MAX_SOURCES:
        raise DataError(f"{part.url}: more than {MAX_SOURCES} sources, the limit of the format")
    shifts = [part.line_shift.get(name, 0) for name in names]
    return _Found(part, header, np.array(numbers, np.uint64), np.array(shifts, np.uint64))


def _join_records(one: _Found, out: ByteSink) -> None:
    with store.open_input(one.part.url) as file:
        first = 0
        size = RECORD.itemsize * one.header.num_documents
        for piece in _pieces(file, HEADER.size, size, one):
            records = np.frombuffer(piece, RECORD).copy()
            check_records(records, one.header, first, one.part.url)
            own = records["where"] >> np.uint64(LENGTH_BITS)
            records["line"] += one.shifts[own]
            records["where"] &= np.uint64(MAX_LENGTH)
            records["where"] |= one.numbers[own] << np.uint64(LENGTH_BITS)
            out.write(records.tobytes())
            first += len(records)


def _join_id_ends(one: _Found, base: int, out: ByteSink) -> None:
    header = one.header
    if not header.has_ids:
        write_repeated(base, header.num_documents, out)
        return
    with store.open_input(one.part.url) as file:
        last = np.zeros(1, np.uint64)
        for piece in _pieces(file, header.starts()[2] + 8, 8 * header.num_documents, one):
            ends = np.frombuffer(piece, "<u8")
            check_bounds(np.append(last, ends), 0, header.id_bytes, f"{one.part.url}: ids")
            out.write((ends + np.uint64(base)).tobytes())
            last = ends[-1:]
    if int(last[0]) != header.id_bytes:
        raise ArtifactError(f"{one.part.url}: the ids do not fill their part of the file: damaged")


def _pieces(file: BinaryIO, start: int, size: int, one: _Found) -> Iterator[bytes]:
    """Bytes of a file in pieces of whole records."""
    file.seek(start)
    while size:
        wanted = min(size, RECORD.itemsize * CHUNK)
        piece = file.read(wanted)
        if len(piece) < wanted:
            raise ArtifactError(f"{one.part.url}: was truncated while it was read; run again")
        size -= wanted
        yield piece
