"""Which documents of a corpus may have an n-gram of a set, from its bytes, without parsing them.

What `byte_kernels` does not call plain is left to a reader of JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import orjson

from trainyard.collection.contamination import byte_kernels, key_kernels
from trainyard.collection.contamination.byte_kernels import (
    BEGIN,
    CHARS,
    END,
    FLAGS,
    HAS_ORIGIN,
    LETTERS,
    PAD,
    TEXT,
    TEXT_END,
)
from trainyard.collection.contamination.ngrams import CAPITAL_SIGMA, Matcher
from trainyard.collection.contamination.prefilter import (
    MULTIPLIER,
    NO_TOKEN,
    SHIFT,
    SIZES,
    Prefilter,
)

LEAST_LINE = 8
"""Bytes of a plain document and its line feed, at least."""

MANY_KEYS = 16
"""Places of a text that are worth a look each."""

Array = npt.NDArray[Any]


class Skimmed(NamedTuple):
    """Consecutive lines, each a plain document."""

    num_lines: int
    chars: int
    """Of all their texts."""
    have_origin: set[bool]
    """Whether documents have one."""
    suspects: dict[int, str]
    """Texts that may have an n-gram, by the number of the line, ascending."""


class Skimmer:
    """Skims lines of JSON. Keeps memory for the largest block so far."""

    def __init__(self, matcher: Matcher, prefilter: Prefilter, key: str, max_bytes: int) -> None:
        """key: of the text. max_bytes: of a line; a longer one is not plain."""
        self._matcher, self._prefilter = matcher, prefilter
        self._key, self._most = key, max_bytes
        self._name = np.array(list(key.encode()), np.uint8)
        codes = np.fromiter(map(ord, prefilter.letters), np.int64) % LETTERS
        self._letters = np.zeros(LETTERS // 64, np.uint64)
        np.bitwise_or.at(self._letters, codes // 64, np.uint64(1) << (codes % 64).astype(np.uint64))
        self._room(1 << 20)

    def skim(self, block: bytes) -> Skimmed | None:
        """Look at the lines of a block, without the last line feed; None if one is not plain."""
        size = len(block)
        if size + PAD > len(self._data):
            self._room(size)
        words = -(-(size + 1) // 64) + 1
        data = self._data[: words * 64]
        data[:size] = np.frombuffer(block, np.uint8)
        data[size] = ord("\n")
        data[size + 1 :] = 0
        token, special = self._token[:words], self._special[:words]
        kinds = self._kinds[: words * 64]
        byte_kernels.mark(data, kinds, kinds.view(np.uint64), token, special, NO_TOKEN)
        lines = self._lines
        count = byte_kernels.read_lines(
            *(data, token, special, self._letters, self._rare, self._text),
            *(size, self._name, lines, self._most),
        )
        if count < 0:
            return None
        lines = lines[:count]
        flags = lines[:, FLAGS]
        origins = set((flags & HAS_ORIGIN != 0).tolist())
        places = self._places(token)
        keyed = np.searchsorted(lines[:, END], places)
        suspects = {}
        lettered = set(self._with_letters(block, lines))
        for number in sorted(lettered.union(keyed.tolist())):
            line = lines[number]
            text = str(orjson.loads(block[line[BEGIN] : line[END]])[self._key])
            keys = places[keyed == number].tolist()
            before = (block[line[TEXT] : place] for place in keys)
            has_word = number in lettered and self._prefilter.has_word(text)
            if has_word or self._is_suspect(text, len(keys), before):
                suspects[number] = text
        return Skimmed(count, int(lines[:, CHARS].sum()), origins, suspects)

    def _with_letters(self, block: bytes, lines: Array) -> list[int]:
        """The lines of which a text may have a word of the n-grams without a key."""
        rare = self._rare[1 : 1 + self._rare[0]]
        numbers = np.searchsorted(lines[:, END], rare)
        first = np.flatnonzero(numbers[1:] != numbers[:-1]) + 1
        found, may_have = [], self._prefilter.may_have_word
        for places in np.split(rare, first) if len(rare) else ():
            number = int(np.searchsorted(lines[:, END], places[0]))
            begin, end = lines[number, [TEXT, TEXT_END]].tolist()
            places = places[(begin <= places) & (places < end)] - begin
            text = block[begin:end]
            if len(places) > MANY_KEYS or any(may_have(text, at) for at in places.tolist()):
                found.append(number)
        return found

    def _is_suspect(self, text: str, num_keys: int, before: Iterator[bytes]) -> bool:
        """Whether a text has an n-gram around one of its keys. before: what precedes each."""
        if num_keys and (num_keys > MANY_KEYS or CAPITAL_SIGMA in text):
            return True  # then it is cheaper to search all of it once, as is done with suspects
        places = (len(orjson.loads(b'"%b"' % one)) for one in before)
        return any(self._matcher.has_around(text, place) for place in places)

    def _places(self, token: Array) -> Array:
        keys = self._prefilter.keys
        if keys is None:
            return np.empty(0, np.int64)
        given = self._windows, token, keys.least, MULTIPLIER
        count = key_kernels.find_keys(
            *(*given, keys.first, keys.bits, SHIFT, self._near, self._hashes)
        )
        places = self._near[keys.are_first(self._hashes[:count])]
        hashes = np.zeros((len(places), len(SIZES)), np.uint64)
        key_kernels.hash_keys(*given, places, hashes)
        return places[keys.are_keys(hashes.T)]

    def _room(self, size: int) -> None:
        words = -(-size // 64) + 3
        self._data = np.zeros(words * 64 + 8, np.uint8)
        self._windows = np.ndarray((words * 64,), np.uint64, self._data.data, strides=(1,))
        self._kinds = np.zeros(words * 64, np.uint8)
        self._token, self._special = np.zeros(words, np.uint64), np.zeros(words, np.uint64)
        self._near = np.zeros(len(self._data) // 2 + 64, np.int64)
        self._hashes = np.zeros(len(self._near), np.uint64)
        self._text = np.zeros(2, np.int64)
        self._rare = np.zeros(len(self._data) // 2, np.int64)
        self._lines = np.zeros((size // LEAST_LINE + 1, 6), np.int64)
