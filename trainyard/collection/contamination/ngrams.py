"""N-grams of evaluation sets, and where they occur in a text.

A word is a run of letters, digits and underscores in lower case, as upstream has it. A text of at
least `most` words has all its `most`-grams; a shorter one of at least `least` words is one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Set
from itertools import accumulate
from typing import NamedTuple

from trainyard.collection.words import lowered

WORD = re.compile(r"\w+")
HEAD_WORDS = 3
"""First words of an n-gram that decide whether the rest is looked at."""


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
        if len(words) < least:
            continue
        joined = " ".join(words)
        if len(words) <= most:
            found.add(joined)
            continue
        ends = list(accumulate(words, lambda end, word: end + 1 + len(word), initial=-1))
        found.update([joined[a + 1 : b] for a, b in zip(ends, ends[most:], strict=False)])
    return found


class Matcher:
    """Finds n-grams of a set."""

    def __init__(self, ngrams: Set[str]) -> None:
        self._ngrams = ngrams
        sizes = sorted({ngram.count(" ") + 1 for ngram in ngrams})
        self._sizes = sizes[-1:] + sizes[:-1]
        """The longest first, then from the shortest up, as upstream looks at a place."""
        self._least = sizes[0] if sizes else 1
        self._head = min(HEAD_WORDS, self._least)
        self._heads = {" ".join(one.split(" ", self._head)[: self._head]) for one in ngrams}

    def hits(self, text: str) -> Iterator[Hit]:
        """Every n-gram of a text, by place; those that overlap too. Of several at a place, the
        longest of all sizes comes first, then the others from the shortest up."""
        lower = lowered(text)
        words = WORD.findall(lower)
        starts: list[int] = []
        for place in range(len(words) - self._least + 1):
            if " ".join(words[place : place + self._head]) not in self._heads:
                continue
            for size in self._sizes:
                ngram = " ".join(words[place : place + size])
                if place + size <= len(words) and ngram in self._ngrams:
                    starts = starts or [match.start() for match in WORD.finditer(lower)]
                    yield Hit(place, starts[place], ngram)
