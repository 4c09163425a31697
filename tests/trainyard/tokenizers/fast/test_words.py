"""Words that are encoded once: what remembers them, by itself."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence

import numpy as np

from trainyard.tokenizers.base import Flat, as_lists
from trainyard.tokenizers.fast.words import WordCache

KNOWN = 50_000
MOST_BYTES = 50_000
"""Less than there are for each of the known words."""


def by_letters(words: Sequence[str]) -> Flat:
    """The code points of words are their ids."""
    bounds = np.cumsum([0, *map(len, words)])
    return np.array([ord(letter) for word in words for letter in word], np.uint32), bounds


def letters(text: str) -> list[int]:
    return [ord(letter) for letter in text if letter != " "]


def test_a_new_word_does_not_copy_those_that_are_known() -> None:
    cache = WordCache(str.split, by_letters)
    known = " ".join(map(str, range(KNOWN)))
    assert cache.lengths([known, "first new"]).tolist() == [len(known) - KNOWN + 1, 8]
    assert cache.lengths(["makes room"]).tolist() == [9]
    tracemalloc.start()
    try:
        assert as_lists(cache.encode(["7 second"])) == [letters("7second")]
        assert cache.lengths(["31 third"]).tolist() == [7]
        assert tracemalloc.get_traced_memory()[1] < MOST_BYTES
    finally:
        tracemalloc.stop()
    assert as_lists(cache.encode([known, "third second"])) == [
        letters(known),
        letters("thirdsecond"),
    ]
