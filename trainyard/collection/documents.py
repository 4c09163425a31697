"""The documents of a unit of work, each with its origin; and the lines that they are written as.

A document keeps every key that it came with. Where it has no key `origin` yet, it gets one: the
name of its file among the inputs, and the bytes it has there, so that what a later stage tokenizes
still says where it is from."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import orjson

from trainyard.artifacts.block_digest import RangeDigests
from trainyard.artifacts.store import FileInfo
from trainyard.artifacts.urls import canonical_each
from trainyard.corpus.documents import BadLine, DocumentReader
from trainyard.corpus.formats.bounds import MAX_DOCUMENT_BYTES
from trainyard.corpus.formats.jsonl import Skim
from trainyard.corpus.formats.records import ORIGIN, Rows
from trainyard.corpus.units import Unit

DROPPED = "dropped"

ADVICE = "--on-bad-line skip puts such lines among the dropped documents"


def short_names(urls: Sequence[str]) -> dict[str, str]:
    """Each URL without the folders that all have in common: they say where the files lie today,
    which is no property of a document."""
    spelled = list(canonical_each(urls))
    folders = [url.rsplit("/", 1)[0].split("/") if "/" in url else [] for url in spelled]
    shared = 0
    for parts in zip(*folders, strict=False):
        if len(set(parts)) > 1:
            break
        shared += 1
    return {
        url: "/".join(spelt.split("/")[shared:]) for url, spelt in zip(urls, spelled, strict=True)
    }


class Place(NamedTuple):
    """Where a document lies in the input of this stage."""

    file: str
    offset: int
    length: int
    within: int | None = None
    """Of a document in a member of a compressed file: where it begins in the contents of the
    member, which itself begins at `offset`. None: `offset` says it all."""

    def document(self) -> dict[str, Any]:
        """The value of the key `origin`."""
        place = {"file": self.file, "offset": self.offset, "length": self.length}
        return place if self.within is None else {**place, "within": self.within}


class Item(NamedTuple):
    """A document of the input."""

    place: Place
    fields: dict[str, Any]
    """The JSON object, with its origin."""


@dataclass(slots=True)
class UnitReader:
    """Reads a unit. Iterate over `items`; `bad` fills with the bad lines that were skipped."""

    unit: Unit
    names: Mapping[str, str]
    """Short names of the files."""
    key: str = "text"
    on_bad_line: Literal["stop", "skip"] = "stop"
    max_bytes: int = MAX_DOCUMENT_BYTES
    advice: str = ADVICE
    """What the error about a bad line says to do."""
    bad: list[tuple[Place, BadLine]] = field(default_factory=list)
    digested: Mapping[str, FileInfo] = field(default_factory=dict)
    """Files of which blocks are digested as they are read."""
    digests: list[list[str]] = field(default_factory=list)
    """Of each source that was read, those of its blocks."""

    def items(self) -> Iterator[Item]:
        """The documents, in order; an empty text is one."""
        for name, reader in self._readers():
            for record in reader.records():
                place = Place(name, record.offset, record.length)
                record.fields.setdefault(ORIGIN, place.document())
                yield Item(place, record.fields)

    def rows(self, skim: Skim | None = None) -> Iterator[Rows]:
        """The same, unchanged, about a megabyte at once; for a pass that only reads. skim: takes
        lines of JSONL, which are left out."""
        for _, reader in self._readers():
            yield from reader.rows(skim)

    def _readers(self) -> Iterator[tuple[str, DocumentReader]]:
        for source in self.unit.sources:
            file = self.digested.get(source.url)
            digests = file and RangeDigests(source.url, source.start, source.end, file.size_bytes)
            reader = DocumentReader(
                source,
                (self.key,),
                on_bad_line=self.on_bad_line,
                advice=self.advice,
                max_bytes=self.max_bytes,
                passing=digests.pass_by if digests else None,
            )
            name = self.names[source.url]
            yield name, reader
            self.bad += [(Place(name, bad.offset, 0), bad) for bad in reader.bad]
            self.digests.append(digests.finish() if digests else [])


def as_line(fields: Mapping[str, Any] | list[Any]) -> bytes:
    """A document, or a list, as a line of JSONL, UTF-8; what orjson refuses, such as half a
    character of UTF-16 in a key that no stage reads, is escaped."""
    try:
        return orjson.dumps(fields, option=orjson.OPT_APPEND_NEWLINE)
    except TypeError:
        return json.dumps(fields).encode() + b"\n"


def dropped(fields: Mapping[str, Any], rule: str, why: str, **more: Any) -> dict[str, Any]:
    """A document among the dropped ones, with the reason."""
    return {**fields, DROPPED: {"rule": rule, "why": why, **more}}


def dropped_line(place: Place, bad: BadLine) -> dict[str, Any]:
    """A bad line among the dropped documents."""
    return dropped(
        {"excerpt": bad.excerpt, ORIGIN: {"file": place.file, "offset": place.offset}},
        "bad_line",
        bad.reason,
    )
