"""Which of many texts may have an n-gram of a set: by their bytes, a megabyte at once.

Of each n-gram a few neighbouring words of ASCII letters stand for it, its key. A word counts by its
first 8 bytes and its length, so some texts are named in vain; each text with an n-gram is named."""

from __future__ import annotations

import re
from collections.abc import Sequence, Set
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt

from trainyard.collection.words import lowered

Array = npt.NDArray[Any]

TABLE_BITS = 22
SHIFT = np.uint64(64 - TABLE_BITS)
MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
WORD_BYTES = 8
MASKS = np.array([(1 << 8 * n) - 1 for n in range(WORD_BYTES + 1)], np.uint64)
"""By the length of a word: which of 8 bytes, little-endian, are of it."""

LOWER = bytes(
    ord(chr(n).lower()) if n < 128 and (chr(n).isalnum() or chr(n) == "_") else 0
    for n in range(256)
)
"""For bytes.translate: lower case, and 0 for what is in no ASCII word."""
KELVIN = "\u212a".encode()
"""The only letter outside of ASCII whose lower case is in it."""
MOST_KEY_WORDS = 8
LEAST_KEY_WORDS = 4
"""Of an n-gram with words of other letters; one with fewer ASCII words in a row has no key."""


class Prefilter:
    """Knows a set of n-grams, words in lower case joined by blanks."""

    def __init__(self, ngrams: Set[str]) -> None:
        keys: dict[int, list[str]] = {}
        letters: set[str] = set()
        for ngram in ngrams:
            run = _ascii_run(ngram)
            if ngram.isascii() or len(run) >= LEAST_KEY_WORDS:
                width = min(1 << len(run).bit_length() - 1, MOST_KEY_WORDS)
                keys.setdefault(width, []).append(_key(run, width))
            else:
                letters.add(max(ngram))
        self._letters = re.compile(f"[{re.escape(''.join(sorted(letters)))}]") if letters else None
        """Of every n-gram without a key, the letter farthest from ASCII."""
        self._tables = {width: _Table.of(keys[width], width) for width in sorted(keys)}

    def suspects(self, texts: Sequence[str]) -> list[int]:
        """Ascending numbers of the texts that may have an n-gram."""
        parts = [text.encode(errors="surrogatepass") for text in texts]
        data = b"\n".join(parts)
        if KELVIN in data:
            return list(range(len(texts)))
        named: set[int] = set()
        if self._letters is not None:
            others = ((number, text) for number, text in enumerate(texts) if not text.isascii())
            search = self._letters.search
            named.update(number for number, text in others if search(lowered(text)))
        ends = np.cumsum([len(part) + 1 for part in parts])
        starts, found = _words(data)
        width = 1
        for wanted, table in self._tables.items():
            found, width = _widened(found, width, wanted), wanted
            named.update(np.searchsorted(ends, starts[table.places(found)], "right").tolist())
        return sorted(named)


@dataclass(frozen=True, slots=True)
class _Table:
    """The keys of one number of words."""

    hashes: Array
    """u64, ascending."""
    bits: Array
    """(1 << TABLE_BITS,) whether a hash begins with these bits: most places need no more."""

    @staticmethod
    def of(keys: Sequence[str], width: int) -> _Table:
        """keys: words joined by blanks, as many in each."""
        _, values = _words("\n".join(keys).encode())
        hashes = np.unique(_widened(values, 1, width)[::width])
        bits = np.zeros(1 << TABLE_BITS, np.bool_)
        bits[hashes >> SHIFT] = True
        return _Table(hashes, bits)

    def places(self, hashes: Array) -> Array:
        """Where a key is."""
        near = np.flatnonzero(self.bits[hashes >> SHIFT])
        at = np.searchsorted(self.hashes, hashes[near])
        chosen: Array = near[self.hashes[np.minimum(at, len(self.hashes) - 1)] == hashes[near]]
        return chosen


def _ascii_run(ngram: str) -> list[str]:
    """The longest run of ASCII words."""
    words = ngram.split(" ")
    if ngram.isascii():
        return words
    runs = (list(run) for is_ascii, run in groupby(words, str.isascii) if is_ascii)
    return max(runs, key=len, default=[])


def _key(run: Sequence[str], width: int) -> str:
    """So many words of a run; of few words the longest, as short ones are in many texts."""
    places = range(1 if width == MOST_KEY_WORDS else len(run) - width + 1)
    return max((" ".join(run[place : place + width]) for place in places), key=len)


def _words(data: bytes) -> tuple[Array, Array]:
    """(n,) starts and u64 values of the ASCII words."""
    padded = b"\0" + data.translate(LOWER) + bytes(WORD_BYTES)
    is_word = np.frombuffer(padded, np.uint8) != 0
    edges = np.flatnonzero(is_word[1:] != is_word[:-1])
    starts = edges[::2]
    lengths = edges[1::2] - starts
    # Eight bytes from each place on.
    windows = np.ndarray((len(data) + 1,), "<u8", padded, offset=1, strides=(1,))
    values = windows[starts] & MASKS[np.minimum(lengths, WORD_BYTES)]
    values += lengths.astype(np.uint64)
    values *= MULTIPLIER
    values ^= values >> np.uint64(29)
    return starts, values


def _widened(hashes: Array, width: int, wanted: int) -> Array:
    """Hashes of runs of `wanted` words from those of `width`; both are powers of two."""
    while width < wanted:
        multiplier = np.uint64(pow(int(MULTIPLIER), width, 1 << 64))
        hashes = hashes[:-width] * multiplier + hashes[width:]
        width *= 2
    return hashes
