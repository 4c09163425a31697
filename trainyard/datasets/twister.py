"""The two Mersenne twisters of C++, std::mt19937 and std::mt19937_64, as arrays of draws.

Megatron-LM's sample mappings are drawn from them, so equal mappings need equal streams. numpy has
the first; the second is the same recurrence on words of 64 bits and is written out here."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

WORDS = 312
LAG = 156
"""Word k + 312 is made of the words k, k + 1 and k + 156: 156 of them can be made at once."""

UPPER = np.uint64(0xFFFFFFFF80000000)
LOWER = np.uint64(0x7FFFFFFF)
MATRIX = np.uint64(0xB5026F5AA96619E9)
SEED_FACTOR = 6364136223846793005
MASK64 = (1 << 64) - 1


class Twister32:
    """std::mt19937(seed)."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.RandomState(seed % 2**32)

    def draw(self, count: int) -> NDArray[np.uint32]:
        """The next `count` draws."""
        return self._random.randint(0, 2**32, count, dtype=np.uint32)


class Twister64:
    """std::mt19937_64(seed)."""

    def __init__(self, seed: int) -> None:
        words = [seed & MASK64]
        for number in range(1, WORDS):
            before = words[-1]
            words.append((SEED_FACTOR * (before ^ (before >> 62)) + number) & MASK64)
        self._state = np.array(words, np.uint64)
        self._spare = np.empty(0, np.uint64)

    def draw(self, count: int) -> NDArray[np.uint64]:
        """The next `count` draws."""
        missing = max(count - len(self._spare), 0)
        draws = np.concatenate([self._spare, self._advance(-(-missing // LAG))])
        self._spare = draws[count:].copy()
        return draws[:count]

    def _advance(self, strides: int) -> NDArray[np.uint64]:
        """The next 156 * strides draws."""
        words = np.empty(WORDS + strides * LAG, np.uint64)
        words[:WORDS] = self._state
        for k in range(0, strides * LAG, LAG):
            mixed = (words[k : k + LAG] & UPPER) | (words[k + 1 : k + 1 + LAG] & LOWER)
            twisted = (mixed >> np.uint64(1)) ^ ((mixed & np.uint64(1)) * MATRIX)
            np.bitwise_xor(
                twisted, words[k + LAG : k + WORDS], out=words[k + WORDS : k + WORDS + LAG]
            )
        self._state = words[-WORDS:].copy()
        return _temper(words[WORDS:])


def _temper(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    words ^= (words >> np.uint64(29)) & np.uint64(0x5555555555555555)
    words ^= (words << np.uint64(17)) & np.uint64(0x71D67FFFEDA60000)
    words ^= (words << np.uint64(37)) & np.uint64(0xFFF7EEE000000000)
    words ^= words >> np.uint64(43)
    return words
