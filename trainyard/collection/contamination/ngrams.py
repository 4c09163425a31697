"""N-grams of evaluation sets, and where they occur in a text.

A word is a run of letters, digits and underscores in lower case, as upstream has it. A text of at
least `most` words has all its `most`-grams; a shorter one of at least `least` words is one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from trainyard.collection.words import lowered

WORD = re.compile(r"\w+")
MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
TABLE_BITS = 22
NGRAMS_AT_ONCE = 1 << 12

Array = npt.NDArray[Any]


class Hit(NamedTuple):
    """An n-gram in a text."""

    word: int
    """Number of its first word."""
    start: int
    """Where that begins in the text."""
    ngram: str


def task_ngrams(texts: Iterable[str], least: int, most: int) -> set[str]:
    """The n-grams of an evaluation set, their words joined by blanks."""
    found: set[str] = set()
    for text in texts:
        words = WORD.findall(lowered(text))
        if least <= len(words) < most:
            found.add(" ".join(words))
        for i in range(len(words) - most + 1):
            found.add(" ".join(words[i : i + most]))
    return found


class Matcher:
    """Finds n-grams of a set. A table of bits by hash leaves few places where words are joined."""

    def __init__(self, ngrams: Set[str]) -> None:
        self._ngrams = ngrams
        by_size: dict[int, list[str]] = {}
        for ngram in ngrams:
            by_size.setdefault(ngram.count(" ") + 1, []).append(ngram)
        self._tables = {}
        # The longest first, then from the shortest up, as upstream looks at a place.
        sizes = sorted(by_size)
        for size in sizes[-1:] + sizes[:-1]:
            table = np.zeros(1 << TABLE_BITS, np.bool_)
            for start in range(0, len(by_size[size]), NGRAMS_AT_ONCE):
                some = " ".join(by_size[size][start : start + NGRAMS_AT_ONCE])
                table[_slots(_hashes(some).reshape(-1, size).T)] = True
            self._tables[size] = table

    def hits(self, text: str) -> Iterator[Hit]:
        """Every n-gram of a text, by place; those that overlap too. Of several at a place, the
        longest of all sizes comes first, then the others from the shortest up."""
        lower = lowered(text)
        words = WORD.findall(lower)
        starts: list[int] = []
        for place, size in self._candidates(words):
            ngram = " ".join(words[place : place + size])
            if ngram in self._ngrams:
                starts = starts or [match.start() for match in WORD.finditer(lower)]
                yield Hit(place, starts[place], ngram)

    def _candidates(self, words: Sequence[str]) -> list[tuple[int, int]]:
        """(place, size), by place."""
        if not words:
            return []
        hashes = _hashes(" ".join(words))
        found = []
        for order, (size, table) in enumerate(self._tables.items()):
            count = len(hashes) - size + 1
            if count < 1:
                continue
            slots = _slots([hashes[i : i + count] for i in range(size)])
            found += [(place, order, size) for place in np.flatnonzero(table[slots]).tolist()]
        return [(place, size) for place, _, size in sorted(found)]


def _hashes(text: str) -> Array:
    """(n,) u64 of words that one blank separates."""
    words = text.encode(errors="surrogatepass").split(b" ")
    return np.frombuffer(b"".join(map(xxhash.xxh3_64_digest, words)), "<u8")


def _slots(columns: Any) -> Array:
    """Place in the table of each n-gram. columns: the hashes of its words, one array a word."""
    found = np.zeros(len(columns[0]), np.uint64)
    for hashes in columns:
        found = found * MULTIPLIER + hashes
    found ^= found >> np.uint64(32)
    return (found * MULTIPLIER) >> np.uint64(64 - TABLE_BITS)


def tasks_by_ngram(tasks: Mapping[str, Set[str]]) -> dict[str, list[str]]:
    """For every n-gram, the tasks that have it."""
    found: dict[str, list[str]] = {}
    for task, ngrams in tasks.items():
        for ngram in ngrams:
            found.setdefault(ngram, []).append(task)
    return found
