"""Ids of texts from those of their words, which are encoded once and then remembered.

For tokenizers of which no token spans a blank, tab or line end, and none depends on what is beyond
one. Natural text repeats its words, so it is encoded several times as fast as by the library. Knows
nothing of the library."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain, islice
from threading import Lock
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from trainyard.tokenizers.base import Flat

MAX_WORDS = 1 << 19
"""Words that are remembered: some 80 MB."""
MAX_LETTERS = 1 << 23
"""And their characters."""
MOST_NEW = 0.5
"""Texts of which more words than this share are new are encoded whole."""
FEW_WORDS = 1000
"""Of fewer, none are."""

T = TypeVar("T", bound=np.generic)
Encode = Callable[[Sequence[str]], Flat]
Split = Callable[[str], list[str]]


def between_blanks(text: str) -> list[str]:
    """What is between blanks, tabs and line ends; empty where two of them are."""
    return text.replace("\n", " ").replace("\t", " ").replace("\r", " ").split(" ")


class _Numbers(dict[str, int]):
    """Numbers of words, in the order of their first occurrence."""

    def __missing__(self, word: str) -> int:
        number = self[word] = len(self)
        return number


class WordCache:
    """Encodes texts from any number of threads, one at a time."""

    def __init__(self, split: Split, encode: Encode, whole: Encode | None = None) -> None:
        """split: cuts a text into words. encode: encodes several words, each for itself. whole:
        encodes texts of which most words are new; None: words do, too."""
        self._split, self._encode, self._whole, self._lock = split, encode, whole, Lock()
        self._forget()

    def _forget(self) -> None:
        self._count = 0
        """Words of which the ids are known; those behind them have a number only."""
        self._numbers = _Numbers()
        self._letters = 0
        self._ids = np.zeros(0, np.uint32)
        self._bounds = np.zeros(1, np.int64)

    def encode(self, texts: Sequence[str]) -> Flat:
        """The ids of several texts."""
        with self._lock:
            found = self._numbered(texts)
            if found is None:
                assert self._whole is not None
                return self._whole(texts)
            numbers, ends = found
            begins, counts = self._spans(numbers)
            after = _from_zero(counts)
            # Of each id, how far its place in the cache is from its place in the result.
            places = np.repeat(begins - after[:-1], counts)
            places += np.arange(after[-1])
            return self._ids[places], after[ends]

    def lengths(self, texts: Sequence[str]) -> NDArray[np.int64]:
        """(n,) number of ids of each text, without the ids."""
        with self._lock:
            found = self._numbered(texts)
            if found is None:
                assert self._whole is not None
                return np.diff(self._whole(texts)[1])
            numbers, ends = found
            _, counts = self._spans(numbers)
            return np.diff(_from_zero(counts)[ends])

    def _spans(self, numbers: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(where the ids of words begin, how many they are)."""
        begins = self._bounds[numbers]
        return begins, self._bounds[numbers + 1] - begins

    def _numbered(self, texts: Sequence[str]) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
        """(numbers of all words, where those of each text end, from 0 on); None: `whole` is to
        encode."""
        if self._count > MAX_WORDS or self._letters > MAX_LETTERS:
            self._forget()
        self._drop_unlearned()  # of a call that was interrupted
        rows = list(map(self._split, texts))
        ends = _from_zero(np.fromiter(map(len, rows), np.int64, len(rows)))
        known = self._numbers
        words = chain.from_iterable(rows)
        numbers = np.fromiter(map(known.__getitem__, words), np.int64, int(ends[-1]))
        num_new = len(known) - self._count
        if self._whole and num_new > max(MOST_NEW * len(numbers), FEW_WORDS):
            self._drop_unlearned()
            return None
        if num_new:
            self._learn(list(islice(reversed(known), num_new))[::-1])
        return numbers, ends

    def _drop_unlearned(self) -> None:
        while len(self._numbers) > self._count:
            self._numbers.popitem()

    def _learn(self, words: Sequence[str]) -> None:
        ids, bounds = self._encode(words)
        used = self._bounds[self._count]
        self._ids = _with(self._ids, used, ids)
        self._bounds = _with(self._bounds, self._count + 1, used + bounds[1:])
        self._letters += sum(map(len, words))
        self._count += len(words)  # last: what is interrupted before is overwritten


def _with(known: NDArray[T], at: int, more: NDArray[T]) -> NDArray[T]:
    """These values with more from a place on: the same array, or one twice as long if it is
    full."""
    end = at + len(more)
    if end > len(known):
        grown = np.zeros(max(end, 2 * len(known)), known.dtype)
        grown[:at] = known[:at]
        known = grown
    known[at:end] = more
    return known


def _from_zero(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Sums of the first of these, from none to all."""
    sums = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=sums[1:])
    return sums
