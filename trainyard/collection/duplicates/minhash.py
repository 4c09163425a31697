"""MinHash signatures of texts, and their bands for locality-sensitive hashing.

Broder 1997, "On the resemblance and containment of documents"; Leskovec, Rajaraman and Ullman,
"Mining of Massive Datasets", chapter 3. Shapes: s shingles, p permutations, b bands, n
documents."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import xxhash

from trainyard.collection.words import ASCII_WORD, words_of

Array = npt.NDArray[Any]

Shingle = Literal["words", "chars"]
Similarity = Literal["union", "min", "max"]

BLANKS = re.compile(r"\s+")
ASCII_WORDS = bytes(ord(one.lower()) if ASCII_WORD.match(one := chr(n)) else 32 for n in range(256))
"""For bytes.translate: letters in lower case, blanks for what is in no word."""

MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
SHINGLES_AT_ONCE = 1024
"""Keeps the product with the permutations in a processor's cache."""


def normalized(text: str) -> str:
    """Lower case, words separated by one blank, no punctuation."""
    if text.isascii():  # the same, a third of the time
        return b" ".join(text.encode().translate(ASCII_WORDS).split()).decode()
    return " ".join(words_of(text.lower()))


def one_blank(text: str) -> str:
    """Runs of blanks as one, none at the ends."""
    return BLANKS.sub(" ", text).strip()


def mixed(x: Array) -> Array:
    """A bijection of u64 that spreads every bit (the finaliser of splitmix64)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    spread: Array = x ^ (x >> np.uint64(31))
    return spread


@dataclass(frozen=True, slots=True)
class Shingler:
    """Texts to sets of hashed shingles."""

    kind: Shingle
    size: int

    def __call__(self, text: str) -> Array:
        """(s,) u32, ascending, each once. A text shorter than a shingle is one; "" has none. text:
        words with one blank between them."""
        if not text:
            return np.empty(0, np.uint32)
        units = _words(text) if self.kind == "words" else _code_points(text)
        size = min(self.size, len(units))
        count = len(units) - size + 1
        found = np.zeros(count, np.uint64)
        for i in range(size):
            found *= MULTIPLIER
            found += units[i : i + count]
        return _each_once((mixed(found) >> np.uint64(32)).astype(np.uint32))


def _each_once(numbers: Array) -> Array:
    """What np.unique returns, which takes three times as long for the few numbers of a text."""
    numbers.sort()
    is_first = np.ones(len(numbers), np.bool_)
    np.not_equal(numbers[1:], numbers[:-1], out=is_first[1:])
    once: Array = numbers[is_first]
    return once


def _words(text: str) -> Array:
    """(n,) u64 hashes of words."""
    words = text.encode(errors="surrogatepass").split(b" ")
    return np.frombuffer(b"".join(map(xxhash.xxh3_64_digest, words)), "<u8")


def _code_points(text: str) -> Array:
    data = text.encode("utf-32-le", errors="surrogatepass")
    return mixed(np.frombuffer(data, "<u4").astype(np.uint64) + np.uint64(1))


@dataclass(frozen=True, slots=True)
class MinHash:
    """A family of permutations x -> (a x + c) mod 2^32, a odd, from a seed."""

    a: Array
    c: Array
    num_bands: int

    @staticmethod
    def of(num_permutations: int, num_bands: int, seed: int) -> MinHash:
        """num_permutations: a multiple of num_bands."""
        drawn = np.random.default_rng(seed).integers(0, 1 << 32, (2, num_permutations), np.uint64)
        a, c = drawn.astype(np.uint32)
        return MinHash((a | np.uint32(1))[:, None], c[:, None], num_bands)

    def signature(self, shingles: Array) -> Array:
        """(p,) u32: the least value of each permutation. shingles: (s,) u32, s at least 1."""
        least = np.full(len(self.a), np.iinfo(np.uint32).max, np.uint32)
        for start in range(0, len(shingles), SHINGLES_AT_ONCE):
            permuted = self.a * shingles[start : start + SHINGLES_AT_ONCE]
            permuted += self.c
            np.minimum(least, permuted.min(axis=1), out=least)
        return least

    def band_keys(self, signatures: Array) -> Array:
        """(n, b) u64: equal in a band where all rows of it are. signatures: (n, p)."""
        rows = signatures.reshape(len(signatures), self.num_bands, -1).astype(np.uint64)
        keys = np.broadcast_to(np.arange(self.num_bands, dtype=np.uint64), rows.shape[:2]).copy()
        for i in range(rows.shape[2]):
            keys = mixed(keys * MULTIPLIER + rows[:, :, i] + np.uint64(1))
        return keys


def similarity(kind: Similarity) -> Callable[[Array, Array], float]:
    """The Jaccard index of two sets of shingles (union), or their intersection in relation to the
    smaller (min) or larger (max) one, by the names of Megatron-LM's find_duplicates.py."""

    def measure(one: Array, other: Array) -> float:
        if not len(one) or not len(other):
            return 0.0
        both = np.concatenate([one, other])
        both.sort(kind="stable")
        common = int(np.count_nonzero(both[1:] == both[:-1]))
        sizes = {"min": min, "max": max}
        if kind in sizes:
            return common / sizes[kind](len(one), len(other))
        return common / (len(both) - common)

    return measure


def digests(texts: Sequence[bytes]) -> Array:
    """(n, 2) u64: 128 bits of each text (xxh3)."""
    data = b"".join(map(xxhash.xxh3_128_digest, texts))
    return np.frombuffer(data, ">u8").astype(np.uint64).reshape(-1, 2)
