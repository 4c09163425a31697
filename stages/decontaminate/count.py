"""The first pass: which documents have n-grams of evaluation sets, and how often each occurs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

from stages.runtime.document_units import UnitDone, UnitJob, reader_of
from trainyard.artifacts import store
from trainyard.collection.contamination.ngrams import Matcher
from trainyard.collection.contamination.prefilter import Prefilter
from trainyard.collection.documents import UnitReader

NGRAMS = "ngrams.json"
BATCH_CHARS = 1 << 20


def write_ngrams(folder: Path, owners: Mapping[str, Sequence[str]]) -> None:
    """Put n-grams, with the tasks of each, where workers find them."""
    (folder / NGRAMS).write_text(json.dumps(owners))


@cache
def owners_of(folder: str) -> dict[str, list[str]]:
    """The tasks of each n-gram that was put into a folder; read once a process."""
    owners: dict[str, list[str]] = json.loads(Path(folder, NGRAMS).read_text())
    return owners


@cache
def matcher_of(folder: str) -> Matcher:
    """Finds these n-grams."""
    return Matcher(owners_of(folder).keys())


@cache
def prefilter_of(folder: str) -> Prefilter:
    """Finds the texts that may have one."""
    return Prefilter(owners_of(folder).keys())


def name_of(job: UnitJob) -> str:
    """The file of a unit's counts."""
    return f"counts-{job.number:05d}.json"


def count_unit(job: UnitJob) -> UnitDone:
    """Write the number of documents, the documents with hits, and the count of each n-gram."""
    prefilter, matcher = prefilter_of(job.scratch), matcher_of(job.scratch)
    counts: Counter[str] = Counter()
    hits: list[int] = []
    first = 0
    reader = reader_of(job)
    for texts in _batches(reader, job.config.documents.json_key):
        for number in prefilter.suspects(texts):
            if found := list(matcher.hits(texts[number])):
                hits.append(first + number)
                counts.update(hit.ngram for hit in found)
        first += len(texts)
    document = {"documents": first, "hits": hits, "counts": dict(sorted(counts.items()))}
    name = name_of(job)
    data = json.dumps(document).encode()
    record = store.write_bytes(store.join(job.folder, name), data, name)
    return UnitDone((record,), {}, reader.digests)


def _batches(reader: UnitReader, key: str) -> Iterator[list[str]]:
    """The texts of a unit, about a million characters at once."""
    texts: list[str] = []
    size = 0
    for item in reader.items():
        texts.append(str(item.fields[key]))
        size += len(texts[-1])
        if size >= BATCH_CHARS:
            yield texts
            texts, size = [], 0
    yield texts
