"""The first pass: which documents have n-grams of evaluation sets, and how often each occurs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from itertools import chain
from pathlib import Path

import orjson

from stages.runtime.document_units import UnitDone, UnitJob, reader_of
from trainyard.artifacts import store
from trainyard.collection.contamination.ngrams import Matcher
from trainyard.collection.contamination.prefilter import Prefilter
from trainyard.corpus.formats.records import ORIGIN, Rows

NGRAMS, COMMON = "ngrams.json", "common.json"
SPLIT_ID = "split_id"


@dataclass(slots=True)
class Counts:
    """Of a unit."""

    documents: int
    hits: list[int]
    """Numbers of the documents with an n-gram."""
    counts: dict[str, int]
    """Occurrences of each n-gram."""
    chars: int = 0
    """Of all texts."""
    has_origin: bool | None = None
    """Whether all documents have an origin, or none, if each is a line to which keys may be added
    unread. None: they must be read again."""
    first: int = 0
    """Documents of earlier units."""


def write_ngrams(folder: Path, tasks: Mapping[str, Iterable[str]]) -> None:
    """Put the n-grams of each task where workers find them."""
    (folder / NGRAMS).write_bytes(orjson.dumps({name: list(one) for name, one in tasks.items()}))


def write_common(folder: Path, common: Iterable[str]) -> None:
    """Put there those that stay."""
    (folder / COMMON).write_bytes(orjson.dumps(list(common)))


@cache
def tasks_of(folder: str) -> dict[str, dict[str, None]]:
    """The n-grams that were put into a folder; read once a process."""
    tasks = orjson.loads(Path(folder, NGRAMS).read_bytes())
    return {name: dict.fromkeys(ngrams) for name, ngrams in tasks.items()}


@cache
def matcher_of(folder: str) -> Matcher:
    """Finds these n-grams."""
    return Matcher(set().union(*tasks_of(folder).values()))


@cache
def used_matcher_of(folder: str) -> Matcher:
    """Finds those that are not common."""
    return matcher_of(folder).without(set(orjson.loads(Path(folder, COMMON).read_bytes())))


@cache
def prefilter_of(folder: str) -> Prefilter:
    """Finds the texts that may have one."""
    return Prefilter(chain.from_iterable(tasks_of(folder).values()))


def name_of(job: UnitJob) -> str:
    """The file of a unit's counts."""
    return f"counts-{job.number:05d}.json"


def count_unit(job: UnitJob) -> UnitDone:
    """Write the counts of a unit."""
    prefilter = prefilter_of(job.scratch)
    found = Counts(0, [], {})
    counts: Counter[str] = Counter()
    have_origin: set[bool | None] = set()
    reader = reader_of(job)
    for rows in reader.rows():
        texts = [record[job.config.documents.json_key] for record in rows.records]
        for number in prefilter.suspects(texts):
            if hits := list(matcher_of(job.scratch).hits(texts[number])):
                found.hits.append(found.documents + number)
                counts.update(hit.ngram for hit in hits)
        found.documents += len(texts)
        found.chars += sum(map(len, texts))
        have_origin |= _have_origin(rows, job.config.documents.json_key)
    found.counts = dict(sorted(counts.items()))
    found.has_origin = have_origin.pop() if len(have_origin) == 1 else None
    name = name_of(job)
    record = store.write_bytes(store.join(job.folder, name), orjson.dumps(asdict(found)), name)
    return UnitDone((record,), {}, reader.digests)


def _have_origin(rows: Rows, key: str) -> set[bool | None]:
    """What `has_origin` may be for these. A key that may stand twice would pass on unsearched."""
    quoted = orjson.dumps(key)
    if not rows.is_plain or len(rows.records) < rows.num_lines:
        return {None}
    if not all(line[:1] == b"{" and line[-1:] == b"}" for line in rows.raw):
        return {None}
    if any(line.count(quoted) > 1 for line in rows.raw):
        return {None}
    if any(SPLIT_ID in record for record in rows.records):
        return {None}
    return {ORIGIN in record for record in rows.records}
