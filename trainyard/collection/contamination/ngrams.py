"""N-grams of evaluation sets, and where they occur in a text.

A word is a run of letters, digits and underscores in lower case, as upstream has it. A text of at
least `most` words has all its `most`-grams; a shorter one of at least `least` words is one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence, Set
from copy import copy
from itertools import accumulate, islice, repeat
from operator import itemgetter
from typing import NamedTuple

from trainyard.collection.words import lowered

WORD = re.compile(r"\w+")
SIGNS_BLANK = "".join(one if WORD.match(one) else " " for one in map(chr, range(128)))
"""ASCII, with blanks for what is in no word."""
HEAD_CHARS = 16
CAPITAL_SIGMA = "\u03a3"


class Hit(NamedTuple):
    """An n-gram in a text."""

    word: int
    """Number of its first word."""
    start: int
    """Where that begins in the text."""
    ngram: str


def task_ngrams(texts: Iterable[str], least: int, most: int) -> dict[str, None]:
    """The n-grams of an evaluation set in order, each once, their words joined by blanks."""
    found: dict[str, None] = {}
    for text in texts:
        words = _words(lowered(text))
        if len(words) < least:
            continue
        joined = " ".join(words)
        if len(words) <= most:
            found[joined] = None
            continue
        starts = _starts(words)
        for begin, after in zip(starts, starts[most:], strict=False):
            found[joined[begin : after - 1]] = None
    return found


class Matcher:
    """Finds n-grams of a set."""

    def __init__(self, ngrams: Set[str]) -> None:
        self._ngrams = ngrams
        self._sizes = _order(ngrams)
        self._head = min([HEAD_CHARS, *map(len, ngrams)])
        """Characters that decide whether the rest is looked at."""
        self._heads = set(map(itemgetter(slice(self._head)), ngrams))

    def without(self, some: Set[str]) -> Matcher:
        """What finds all but some."""
        if not some:
            return self
        found = copy(self)
        found._ngrams = self._ngrams - some
        found._sizes = _order(found._ngrams)
        return found

    def hits(self, text: str) -> Iterator[Hit]:
        """Every n-gram of a text, by place; those that overlap too. Of several at a place, the
        longest of all sizes comes first, then the others from the shortest up."""
        lower = lowered(text)
        words = _words(lower)
        joined, starts, head = " ".join(words), _starts(words), self._head
        places = [n for n, at in enumerate(starts) if joined[at : at + head] in self._heads]
        where: list[int] = []
        for place in places:
            for size in self._sizes:
                if place + size > len(words):
                    continue
                ngram = joined[starts[place] : starts[place + size] - 1]
                if ngram in self._ngrams:
                    where = where or [match.start() for match in WORD.finditer(lower)]
                    yield Hit(place, where[place], ngram)

    def has_around(self, text: str, at: int) -> bool:
        """Whether a text has an n-gram with what stands at a place."""
        if CAPITAL_SIGMA in text:  # its lower case depends on more than the words around
            return any(self.hits(text))
        most = max(self._sizes) + 1
        after = [match.end() for match in islice(WORD.finditer(text, at), most)]
        begin, chars = at, 8 * most
        while begin > 0 and len(WORD.findall(text, begin, at)) <= most:
            begin, chars = max(begin - chars, 0), 2 * chars
        return any(self.hits(text[begin : max([at, *after])]))


def _words(lower: str) -> list[str]:
    """The words of a text in lower case; of ASCII, five times as fast as by the pattern."""
    return lower.translate(SIGNS_BLANK).split() if lower.isascii() else WORD.findall(lower)


def _starts(words: Sequence[str]) -> list[int]:
    """Where words begin that are joined by blanks, and where a next one would."""
    return [end + number for number, end in enumerate(accumulate(map(len, words), initial=0))]


def _order(ngrams: Set[str]) -> list[int]:
    """Their sizes in words, in Megatron-LM's order: the longest, then from the shortest."""
    sizes = sorted(1 + count for count in set(map(str.count, ngrams, repeat(" "))))
    return sizes[-1:] + sizes[:-1]
