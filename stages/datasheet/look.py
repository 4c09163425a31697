"""One pass over the finished documents: sizes, where they are from, licences and languages."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import xxhash

from stages.datasheet.config import DatasheetConfig
from stages.runtime.document_units import UnitDone, UnitJob
from trainyard.collection.documents import UnitReader
from trainyard.collection.rules.language import identify
from trainyard.corpus.formats.records import ORIGIN

MOST_NAMES = 1000
"""Hosts, sources and licences that a unit reports one by one; the rest are counted together."""
IDENTIFIED_CHARS = 2000
NO_HOST, NO_LICENSE, OTHERS = "no address", "not named", "others"


@dataclass(frozen=True, slots=True)
class LookJob(UnitJob):
    """A unit, with its share of the documents to identify."""

    quota: int = 0

    def final_names(self) -> tuple[str, ...]:
        """None: what is found goes into the page."""
        return ()


@dataclass(slots=True)
class Found:
    """Counts that add up."""

    documents: int = 0
    chars: int = 0
    words: int = 0
    lengths: Counter[str] = field(default_factory=Counter)
    """Documents by the number of bits of their number of characters."""
    hosts: Counter[str] = field(default_factory=Counter)
    sources: Counter[str] = field(default_factory=Counter)
    """Documents by the source of a mixture, or by the file that they were collected from."""
    licenses: Counter[str] = field(default_factory=Counter)
    languages: Counter[str] = field(default_factory=Counter)
    """Of the documents that were identified."""

    def add(self, other: Mapping[str, Any]) -> None:
        """Count what a unit found."""
        for name in ("documents", "chars", "words"):
            setattr(self, name, getattr(self, name) + other[name])
        for name in ("lengths", "hosts", "sources", "licenses", "languages"):
            getattr(self, name).update(other[name])


def look_unit(job: LookJob) -> UnitDone:
    """What a unit has; facts: the fields of `Found`."""
    config: DatasheetConfig = job.config
    reader = UnitReader(
        job.unit, job.names, config.json_key, "stop", config.max_document_bytes, advice=""
    )
    found = Found()
    drawn: list[tuple[int, str]] = []
    for item in reader.items():
        text = str(item.fields[config.json_key])
        found.documents += 1
        found.chars += len(text)
        found.words += len(text.split())
        found.lengths[str(len(text).bit_length())] += 1
        found.hosts[host_of(item.fields)] += 1
        found.sources[source_of(item.fields)] += 1
        found.licenses[str(item.fields.get("license") or NO_LICENSE)[:200]] += 1
        _draw(drawn, job.quota, text)
    for _, text in drawn:
        found.languages[identify(text, IDENTIFIED_CHARS)[0]] += 1
    facts = {
        **{name: getattr(found, name) for name in ("documents", "chars", "words")},
        **{
            name: _shortened(getattr(found, name))
            for name in ("lengths", "hosts", "sources", "licenses", "languages")
        },
    }
    return UnitDone((), facts)


def host_of(fields: Mapping[str, Any]) -> str:
    """The host of a document's address."""
    url = fields.get("url")
    try:
        return (urlsplit(url).hostname if isinstance(url, str) else None) or NO_HOST
    except ValueError:
        return NO_HOST


def source_of(fields: Mapping[str, Any]) -> str:
    """What a document was mixed from, else the file that it was collected from."""
    for key, inner in (("mixed", "source"), (ORIGIN, "file")):
        place = fields.get(key)
        if isinstance(place, Mapping) and isinstance(place.get(inner), str):
            return str(place[inner])
    return OTHERS


def _draw(drawn: list[tuple[int, str]], quota: int, text: str) -> None:
    """Keep the documents with the smallest hashes."""
    if not quota or not text.strip():
        return
    data = text.encode(errors="surrogatepass")
    row = (-xxhash.xxh3_64_intdigest(data), text[:IDENTIFIED_CHARS])
    if len(drawn) < quota:
        heapq.heappush(drawn, row)
    elif row > drawn[0]:
        heapq.heapreplace(drawn, row)


def _shortened(counts: Counter[str]) -> dict[str, int]:
    most = sorted(counts.items(), key=lambda one: (-one[1], one[0]))
    rest = sum(count for _, count in most[MOST_NAMES:])
    return {**dict(most[:MOST_NAMES]), **({OTHERS: rest} if rest else {})}
