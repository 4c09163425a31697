"""Sidecars of some parts to that of the whole, as a stream; `sidecar` has the layout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np

from trainyard.artifacts import store
from trainyard.corpus.layout import CHUNK, ByteSink
from trainyard.corpus.sidecar import (
    HEADER,
    LENGTH_BITS,
    MAX_LENGTH,
    MAX_SOURCES,
    RECORD,
    Array,
    Header,
    check_bounds,
    check_records,
    parse_header,
    parse_names,
    write_names,
    write_repeated,
)
from trainyard.errors import ArtifactError, DataError


@dataclass(frozen=True, slots=True)
class Part:
    """A sidecar to be joined with others."""

    url: str
    line_shift: Mapping[str, int] = field(default_factory=dict)
    """By source, the number added to its line numbers: its lines before this part."""


@dataclass(slots=True)
class _Found:
    part: Part
    header: Header
    numbers: Array
    """Number of each of its sources in the whole."""
    shifts: Array


def join_provenance(parts: Sequence[Part], out: ByteSink, scratch: Path | None = None) -> None:
    """The sidecar of all documents of the parts, in their order: what one writer would have made.

    A stream: memory grows with the sources alone. Raises ArtifactError for a damaged part."""
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


def _look_at(part: Part, sources: dict[str, int]) -> _Found:
    size = store.info(part.url).size_bytes
    with store.open_input(part.url) as file:
        header = parse_header(file.read(HEADER.size), size, part.url)
        bounds_at, names_at, *_ = header.starts()
        file.seek(bounds_at)
        bounds = np.frombuffer(file.read(names_at - bounds_at), "<u8")
        names = parse_names(bounds, file.read(header.name_bytes), part.url)
    numbers = [sources.setdefault(name, len(sources)) for name in names]
    if len(sources) > MAX_SOURCES:
        raise DataError(f"{part.url}: more than {MAX_SOURCES} sources; the format ends there")
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
        raise ArtifactError(f"{one.part.url}: the ids do not fill their place: damaged")


def _pieces(file: BinaryIO, start: int, size: int, one: _Found) -> Iterator[bytes]:
    """Bytes of a file in pieces of whole records."""
    file.seek(start)
    while size:
        wanted = min(size, RECORD.itemsize * CHUNK)
        piece = file.read(wanted)
        if len(piece) < wanted:
            raise ArtifactError(f"{one.part.url}: was cut short while it was read")
        size -= wanted
        yield piece
