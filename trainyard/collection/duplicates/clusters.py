"""Which document stands for which: exact duplicates, then near ones, as a table.

Every decision is by digests of contents, so the order of the input decides nothing: documents with
the same digests are the same, and one of them stays."""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from trainyard.collection.duplicates.fingerprints import Fingerprints
from trainyard.collection.duplicates.minhash import Array, Similarity, similarity
from trainyard.collection.duplicates.spill import Spill

Keep = Literal["longest", "smallest-hash"]

EXACT, NEAR = "exact", "near"

FILES = ("order", "ends", "shingles", "names", "name_ends")


class Duplicate(NamedTuple):
    """A document that another stands for."""

    document: int
    kept: int
    rule: str
    similarity: float
    """With `kept` itself; of a chain of near duplicates it may be below the threshold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NearRules:
    """How candidates are verified and united."""

    measure: Similarity
    threshold: float
    """Least similarity of two documents of one cluster that were compared."""
    bucket_threshold: float
    """Least similarity with which a document leaves a bucket."""
    heuristic_iter: int
    """Main documents to compare the others of a bucket with; -1: until one is left."""


class Corpus:
    """What is known of all documents, in files of a scratch folder: memory does not hold it."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder = folder
        self._files = {name: (folder / name).open("wb") for name in FILES}
        self.count = self._num_shingles = self._name_bytes = 0

    def add(self, part: Fingerprints, keep: Keep) -> int:
        """The documents of a unit; returns the number of the first."""
        first = self.count
        longest = np.iinfo(np.int64).max - part.sizes
        rank = longest if keep == "longest" else np.zeros_like(part.sizes)
        order = np.column_stack([rank.astype(np.uint64), part.records])
        self._files["order"].write(order.tobytes())
        self._files["ends"].write((part.shingle_ends + self._num_shingles).tobytes())
        self._files["shingles"].write(part.shingles.tobytes())
        self._files["names"].write(part.names.tobytes())
        self._files["name_ends"].write((part.name_ends + self._name_bytes).tobytes())
        self._name_bytes += len(part.names)
        self.count += len(part.texts)
        self._num_shingles += len(part.shingles)
        return first

    def close(self) -> None:
        """Nothing more is added."""
        for file in self._files.values():
            file.close()
        self._order = self._mapped("order", np.uint64).reshape(-1, 3)
        self._ends = self._mapped("ends", np.int64)
        self._shingles = self._mapped("shingles", np.uint32)
        self._names = self._mapped("names", np.uint8)
        self._name_ends = self._mapped("name_ends", np.int64)

    def _mapped(self, name: str, dtype: type) -> Array:
        path = self._folder / name
        if not path.stat().st_size:
            return np.empty(0, dtype)
        return np.asarray(np.memmap(path, dtype, "r"))

    def sorted(self, documents: Array) -> Array:
        """Documents, the one to keep first."""
        return documents[np.lexsort(self._order[documents].T[::-1])]

    def shingles(self, document: int) -> Array:
        """Of one document."""
        return _part(self._shingles, self._ends, document)

    def name(self, document: int) -> dict[str, Any]:
        """Where a document lies, and its id if it has one."""
        file, offset, name = json.loads(_part(self._names, self._name_ends, document).tobytes())
        return {"file": file, "offset": offset, **({} if name is None else {"id": name})}


def _part(flat: Array, ends: Array, i: int) -> Array:
    return flat[int(ends[i - 1]) if i else 0 : int(ends[i])]


class Union:
    """Disjoint sets of those documents that were united with others."""

    def __init__(self) -> None:
        self._parents: dict[int, int] = {}

    def find(self, x: int) -> int:
        """What represents the set of x."""
        parents = self._parents
        root = x
        while (parent := parents.get(root, root)) != root:
            root = parent
        while (parent := parents.get(x, x)) != root:
            parents[x], x = root, parent
        return root

    def unite(self, x: int, y: int) -> None:
        """Make one set of those of x and y."""
        a, b = sorted((self.find(x), self.find(y)))
        self._parents[a] = self._parents[b] = a

    def sets(self) -> Iterator[list[int]]:
        """All sets of more than one."""
        members: dict[int, list[int]] = {}
        for x in self._parents:
            members.setdefault(self.find(x), []).append(x)
        return (sorted(one) for one in members.values() if len(one) > 1)


def exact_duplicates(spill: Spill, corpus: Corpus) -> Iterator[Duplicate]:
    """spill: rows of (digest, digest, document)."""
    for rows, bounds in spill.groups():
        for start, end in pairwise(bounds):
            kept, *rest = corpus.sorted(rows[start:end, 2].astype(np.int64)).tolist()
            yield from (Duplicate(document, kept, EXACT, 1.0) for document in rest)


def near_duplicates(
    spill: Spill, corpus: Corpus, dropped: Array, rules: NearRules
) -> Iterator[Duplicate]:
    """spill: rows of (key of a band, document). dropped: (n,) whether a document went as an exact
    duplicate, which another stands for here."""
    union, measure = Union(), similarity(rules.measure)
    for rows, bounds in spill.groups():
        for start, end in pairwise(bounds):
            documents = rows[start:end, 1].astype(np.int64)
            _unite_bucket(documents[~dropped[documents]], corpus, union, rules)
    for one in union.sets():
        kept, *rest = corpus.sorted(np.array(one, np.int64)).tolist()
        own = corpus.shingles(kept)
        for document in rest:
            yield Duplicate(document, kept, NEAR, measure(own, corpus.shingles(document)))


def _unite_bucket(documents: Array, corpus: Corpus, union: Union, rules: NearRules) -> None:
    """Unite the similar documents of a bucket, by upstream's heuristic: a main document is compared
    with all others, and those that are similar leave; then the next one. The main document is the
    first by contents, where upstream draws one."""
    if len({union.find(document) for document in documents.tolist()}) < 2:
        return  # of one set already, as most are that share several bands
    measure = similarity(rules.measure)
    left = corpus.sorted(documents).tolist()
    iterations = 0
    while len(left) > 1 and iterations != rules.heuristic_iter:
        main, *others = left
        own, left = corpus.shingles(main), []
        for other in others:
            if union.find(other) == union.find(main):
                continue
            found = measure(own, corpus.shingles(other))
            if found >= rules.threshold:
                union.unite(main, other)
            if found < min(rules.bucket_threshold, rules.threshold):
                left.append(other)
        iterations += 1


def repeated_lines(spill: Spill, gone: Container[int]) -> Iterator[list[tuple[int, int]]]:
    """(document, number of the line) of lines that repeat another, one list a partition.

    spill: rows of (digest, digest, digest of the document, number of the line, document); of equal
    lines, the first by these stays. Lines of documents that are `gone` stand for none."""
    for rows, bounds in spill.groups():
        for start, end in pairwise(bounds):
            places = [(int(row[4]), int(row[3])) for row in rows[start:end]]
            yield [place for place in places if place[0] not in gone][1:]


def flags(count: int, documents: Iterable[int]) -> Array:
    """(count,) true for the given documents."""
    found = np.zeros(count, np.bool_)
    found[np.fromiter(documents, np.int64)] = True
    return found
