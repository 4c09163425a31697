"""Runs of words that repeat another: found by hashed n-grams instead of a suffix array.

Of all n-grams of a text, those with the least hash in each window of w neighbours stand for it
(winnowing: Schleimer, Wilkerson and Aiken, SIGMOD 2003). Two texts with n + w - 1 words in a row in
common therefore share one, and none of fewer than n words is taken for common. Memory and files
hold 2 / (w + 1) of the n-grams. Lee et al. 2022, arXiv:2107.06499, remove runs of 50 tokens."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from trainyard.collection.duplicates.minhash import MULTIPLIER, Array, mixed
from trainyard.collection.words import lowered, word_pattern

WINDOW = 8
"""Neighbouring n-grams of which one is kept: so many words less one may stay at each end."""

BLANK_BOUND = re.compile(r"\S+")


@dataclass(frozen=True, slots=True)
class Spans:
    """Finds and cuts runs of words."""

    num_words: int
    """Every common run of as many words is found."""
    normalize: bool
    """Whether case and punctuation are ignored."""

    @property
    def size(self) -> int:
        """Words of an n-gram."""
        return max(self.num_words - WINDOW + 1, 1)

    def selected(self, text: str) -> Iterator[tuple[int, str]]:
        """(number of its first word, n-gram) of those that stand for a text."""
        words = [match.group() for match in self._matches(text)]
        for start in winnowed(_hashes(words, self.size), WINDOW).tolist():
            yield start, " ".join(words[start : start + self.size])

    def cut(self, text: str, starts: Sequence[int]) -> tuple[str, list[str]]:
        """The text without the n-grams that begin at these words, and what was cut."""
        places = [match.span() for match in self._matches(text)]
        kept, removed, end = [], [], 0
        for first, last in _runs(starts, self.size):
            begin, stop = places[first][0], places[last - 1][1]
            kept.append(text[end:begin])
            removed.append(text[begin:stop])
            end = stop
            if not kept[-1] or kept[-1][-1].isspace():  # the blank before does for both
                end += len(text[end:]) - len(text[end:].lstrip(" "))
        return "".join([*kept, text[end:]]), removed

    def _matches(self, text: str) -> Iterator[re.Match[str]]:
        if self.normalize:
            return word_pattern().finditer(lowered(text))
        return BLANK_BOUND.finditer(text)


def _hashes(words: Sequence[str], size: int) -> Array:
    """(k,) u64 of every n-gram, k = len(words) - size + 1."""
    known = {word: xxhash.xxh3_64_intdigest(word.encode(errors="surrogatepass")) for word in words}
    units = np.fromiter(map(known.__getitem__, words), np.uint64, len(words))
    found = np.zeros(max(len(words) - size + 1, 0), np.uint64)
    for i in range(size if len(found) else 0):
        found *= MULTIPLIER
        found += units[i : i + len(found)]
    return mixed(found)


def winnowed(hashes: Array, window: int) -> Array:
    """Ascending places of the least hash of each window, of equals the last; of a text with fewer
    hashes than a window, none is kept but the least of all."""
    if not len(hashes):
        return np.empty(0, np.int64)
    width = min(window, len(hashes))
    views = np.lib.stride_tricks.sliding_window_view(hashes, width)
    last = width - 1 - np.argmin(views[:, ::-1], axis=1)
    return np.unique(last + np.arange(len(views)))


def _runs(starts: Sequence[int], size: int) -> Iterator[tuple[int, int]]:
    """The n-grams that overlap or touch, as (first word, word after the last)."""
    first = last = -1
    for start in sorted(starts):
        if start > last:
            if last >= 0:
                yield first, last
            first = start
        last = start + size
    if last >= 0:
        yield first, last
