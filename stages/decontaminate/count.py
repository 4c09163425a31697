"""The first pass: which documents have n-grams of evaluation sets, and how often each occurs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from threading import RLock, get_ident
from typing import TYPE_CHECKING, TypeVar

import orjson

from stages.runtime.document_units import UnitDone, UnitJob, reader_of
from trainyard.artifacts import store
from trainyard.collection.contamination.ngrams import Matcher
from trainyard.collection.contamination.prefilter import Prefilter
from trainyard.collection.options import DocumentsConfig
from trainyard.corpus.formats.records import ORIGIN, Rows
from trainyard.corpus.workers import check_stop

if TYPE_CHECKING:
    from trainyard.collection.contamination.skim import Skimmer

NGRAMS, COMMON, SKIM = "ngrams.json", "common.json", "skim"
SKIMMED_BYTES = 64 << 20
"""Input of a worker from which on compiled code saves more time than it takes to load."""
SPLIT_ID = "split_id"
BUILDING = RLock()

T = TypeVar("T")


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
    is_empty: bool = False
    """Whether no line begins here, so that `has_origin` says nothing."""

    @staticmethod
    def of_pieces(pieces: Iterable[Counts]) -> Counts:
        """Those of a unit, from those of its pieces."""
        whole = Counts(0, [], {}, is_empty=True)
        total: Counter[str] = Counter()
        for piece in pieces:
            whole.hits += [whole.documents + number for number in piece.hits]
            whole.documents += piece.documents
            whole.chars += piece.chars
            total.update(piece.counts)
            if whole.is_empty:
                whole.has_origin, whole.is_empty = piece.has_origin, piece.is_empty
            elif not piece.is_empty and piece.has_origin != whole.has_origin:
                whole.has_origin = None
        whole.counts = dict(total)
        return whole


def write_ngrams(
    folder: Path, tasks: Mapping[str, dict[str, None]], size_bytes: int, num_workers: int
) -> None:
    """Put the n-grams of each task where workers find them. size_bytes: of the whole input."""
    _tasks[str(folder)] = tasks
    (folder / NGRAMS).write_bytes(orjson.dumps({name: list(one) for name, one in tasks.items()}))
    if size_bytes >= SKIMMED_BYTES * num_workers:
        (folder / SKIM).touch()


def write_common(folder: Path, common: Iterable[str]) -> None:
    """Put there those that stay."""
    (folder / COMMON).write_bytes(orjson.dumps(list(common)))


def _built_once(build: Callable[[str], T]) -> Callable[[str], T]:
    """Keep what is built of a folder; the threads of a process wait for the first one."""
    kept = cache(build)

    def build_or_wait(folder: str) -> T:
        with BUILDING:
            return kept(folder)

    return build_or_wait


_tasks: dict[str, Mapping[str, dict[str, None]]] = {}
"""By folder, what this process put there."""


@_built_once
def tasks_of(folder: str) -> Mapping[str, dict[str, None]]:
    """The n-grams that were put into a folder; another process reads them once."""
    if folder in _tasks:
        return _tasks[folder]
    tasks = orjson.loads(Path(folder, NGRAMS).read_bytes())
    return {name: dict.fromkeys(ngrams) for name, ngrams in tasks.items()}


@_built_once
def matcher_of(folder: str) -> Matcher:
    """Finds these n-grams."""
    return Matcher(dict.fromkeys(chain.from_iterable(tasks_of(folder).values())).keys())


@_built_once
def used_matcher_of(folder: str) -> Matcher:
    """Finds those that are not common."""
    return matcher_of(folder).without(set(orjson.loads(Path(folder, COMMON).read_bytes())))


@_built_once
def prefilter_of(folder: str) -> Prefilter:
    """Finds the texts that may have one."""
    return Prefilter(chain.from_iterable(tasks_of(folder).values()))


def is_skimmed(folder: str) -> bool:
    """Whether there is so much input that compiled code is worth its loading."""
    return Path(folder, SKIM).exists()


@cache
def skimmer_of(folder: str, key: str, max_bytes: int, thread: int) -> Skimmer | None:
    """Finds them in lines that are not parsed; None if that is not possible, or not worth it.
    thread: which uses it, one at a time, since it keeps memory."""
    prefilter = prefilter_of(folder)
    if not is_skimmed(folder) or not prefilter.is_of_bytes(key):
        return None
    from trainyard.collection.contamination.skim import Skimmer  # LLVM takes time and memory

    return Skimmer(matcher_of(folder), prefilter, key, max_bytes)


def name_of(job: UnitJob) -> str:
    """The file of a unit's counts."""
    return f"counts-{job.label}.json"


def count_unit(job: UnitJob) -> UnitDone:
    """Write the counts of a unit."""
    counter = _Counter(job)
    reader = reader_of(job)
    for rows in reader.rows(counter.skim):
        counter.read(rows)
    name = name_of(job)
    content = orjson.dumps(asdict(counter.counts()))
    record = store.write_bytes(store.join(job.folder, name), content, name)
    return UnitDone((record,), {}, reader.digests)


class _Counter:
    """Counts documents as they are read."""

    def __init__(self, job: UnitJob) -> None:
        documents: DocumentsConfig = job.config.documents
        self._folder, self._key = job.scratch, documents.json_key
        self._found = Counts(0, [], {})
        self._counts: Counter[str] = Counter()
        self._have_origin: set[bool | None] = set()
        self._skimmer = skimmer_of(
            job.scratch, self._key, documents.max_document_bytes, get_ident()
        )

    def skim(self, block: bytes) -> int:
        """Count the documents of lines that need not be parsed; how many they are."""
        check_stop()
        skimmed = self._skimmer.skim(block) if self._skimmer else None
        if skimmed is None:
            return 0
        self._add(skimmed.num_lines, skimmed.chars, skimmed.suspects)
        self._have_origin |= skimmed.have_origin
        return skimmed.num_lines

    def read(self, rows: Rows) -> None:
        """Count documents that were."""
        check_stop()
        texts = [record[self._key] for record in rows.records]
        suspects = prefilter_of(self._folder).suspects(texts)
        self._add(len(texts), sum(map(len, texts)), {n: texts[n] for n in suspects})
        self._have_origin |= _have_origin(rows, self._key)

    def _add(self, count: int, chars: int, suspects: Mapping[int, str]) -> None:
        found = self._found
        for number, text in suspects.items():
            if hits := list(matcher_of(self._folder).hits(text)):
                found.hits.append(found.documents + number)
                self._counts.update(hit.ngram for hit in hits)
        found.documents += count
        found.chars += chars

    def counts(self) -> Counts:
        """What was found."""
        have = self._have_origin
        self._found.counts = dict(sorted(self._counts.items()))
        self._found.has_origin = next(iter(have)) if len(have) == 1 else None
        self._found.is_empty = not have
        return self._found


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
