"""Which sentences make up each BERT or T5 sample.

Rows of (first sentence, one past the last, target length), a pure function of (sentence lengths,
document bounds, rule), bit-equal to Megatron-LM's. Knows nothing of files or tokens.

The rule walks each document and closes a row once it has its target length, for which a shorter
value is sometimes drawn. The end of a row decides which draw the next one gets, so the walk cannot
be divided into independent parts. But the end of a full-length row can be computed ahead for every
sentence at once; then the walk takes one step per row, not one per sentence."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise, repeat
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainyard.errors import DataError

LONG_SENTENCE = 512
"""A document with a sentence of more tokens is not used, unless it is the only document."""

BLOCK_SENTENCES = 1 << 20
"""Sentences processed at once; each takes about 60 bytes of memory."""

DRAWS = 1 << 16
SWAPS_AHEAD = 1 << 16


@dataclass(frozen=True, slots=True)
class MappingRule:
    """How sentences are gathered into samples."""

    max_length: int
    """Tokens at which a row is full."""
    short_seq_prob: float
    """Share of the rows that aim for a random shorter length."""
    seed: int
    min_sentences: int
    """Fewest sentences of a row, and of a document that is used."""

    @property
    def short_ratio(self) -> int:
        """One in this many draws is short; 0: none."""
        return math.floor(1 / self.short_seq_prob + 0.5) if self.short_seq_prob > 0 else 0


def build_mapping(
    sentence_lengths: NDArray[np.int32],
    document_bounds: NDArray[np.int64],
    rule: MappingRule,
    num_samples: int | None = None,
) -> NDArray[Any]:
    """(n, 3) unsigned rows, shuffled, of as many whole epochs as `num_samples` needs; None: one.

    document_bounds: (D + 1,) document d is the sentences [d] up to [d + 1]."""
    dtype = np.uint32 if len(sentence_lengths) <= np.iinfo(np.uint32).max else np.uint64
    targets = _Targets(rule)
    cuts = block_cuts(document_bounds)
    whole = _Block(sentence_lengths, document_bounds, rule) if len(cuts) == 2 else None
    parts: list[NDArray[Any]] = []
    found = 0
    while not parts or (num_samples is not None and found < num_samples):
        before = found
        for first, last in pairwise(cuts):
            bounds = document_bounds[first : last + 1]
            rows = (whole or _Block(sentence_lengths, bounds, rule)).rows(targets).astype(dtype)
            parts.append(rows)
            found += len(rows)
        if found == before:
            raise DataError(
                f"none of the {len(document_bounds) - 1} documents can be used: a document needs "
                f"{rule.min_sentences} sentences or more, of at most {LONG_SENTENCE} tokens each; "
                "was the text split by --split-sentences?"
            )
    return _gather(parts, shuffled_order(found, rule.seed + 1))


def block_cuts(document_bounds: NDArray[np.int64]) -> list[int]:
    """Document numbers at which blocks of whole documents begin, and the end."""
    cuts, num_documents = [0], len(document_bounds) - 1
    while cuts[-1] < num_documents:
        full = document_bounds[cuts[-1]] + BLOCK_SENTENCES
        cut = int(np.searchsorted(document_bounds, full, side="right")) - 1
        cuts.append(min(max(cut, cuts[-1] + 1), num_documents))
    return cuts


def _gather(parts: list[NDArray[Any]], order: NDArray[np.int64]) -> NDArray[Any]:
    rows = np.concatenate(parts)
    parts.clear()  # or else the rows would be in memory three times
    return rows[order]


# --- the lengths that rows aim for ------------------------------------------------------------


class _Targets:
    """The target of each row in turn, from one generator."""

    def __init__(self, rule: MappingRule) -> None:
        self._rule = rule
        self._twister = Twister32(rule.seed)
        self._place = DRAWS
        self.lengths = np.empty(0, np.int64)
        self._short = np.empty(0, np.int64)

    def ahead(self) -> Iterator[tuple[int, int]]:
        """(rows of full length, target of the short row behind them); the last pair has no
        short row, since the current batch of draws ends there."""
        if self._place == DRAWS:
            self._refill()
        places = self._short[np.searchsorted(self._short, self._place) :]
        full = np.diff(places, prepend=self._place - 1, append=DRAWS) - 1
        return zip(full.tolist(), [*self.lengths[places].tolist(), 0], strict=True)

    def take(self, count: int) -> NDArray[np.int64]:
        """The next `count` targets, which `ahead` has shown."""
        taken = self.lengths[self._place : self._place + count]
        self._place += count
        return taken

    def _refill(self) -> None:
        self._place = 0
        self.lengths = np.full(DRAWS, self._rule.max_length, np.int64)
        if self._rule.short_ratio:
            draws = self._twister.draw(DRAWS).astype(np.int64)
            self._short = np.flatnonzero(draws % self._rule.short_ratio == 0)
            self.lengths[self._short] = 2 + draws[self._short] % (self._rule.max_length - 1)


# --- the walk ---------------------------------------------------------------------------------


class _Block:
    """Neighbouring documents, laid out in slots: one for each sentence, then one for the end of
    its document, and behind all of them one to stop at. A walk goes from the slot where a row
    begins to where the next one does; the end of a document draws a target as well, which none
    gets."""

    def __init__(
        self, lengths: NDArray[np.int32], bounds: NDArray[np.int64], rule: MappingRule
    ) -> None:
        self._first = int(bounds[0])
        self._rule = rule
        lengths = lengths[self._first : int(bounds[-1])]
        counts = np.diff(bounds)
        documents = np.arange(len(counts))
        self._ends = bounds[1:] - self._first
        self._totals = np.zeros(len(lengths) + 1, np.int64)
        np.cumsum(lengths, out=self._totals[1:])
        self._document = np.repeat(documents.astype(np.int32), counts + 1)
        self._stop = len(self._document)
        begins = np.where(
            self._usable(lengths, counts), self._ends - counts + documents, self._stop
        )
        begins = np.minimum.accumulate(np.append(begins, self._stop)[::-1])[::-1]
        self._begin = int(begins[0])
        self._next = np.full(self._stop + 1, self._stop, np.int64)
        document = np.repeat(documents, counts)
        sentences = np.arange(len(lengths))
        self._next[sentences + document] = self._full_rows(sentences, document) + document
        self._next[self._ends + documents] = begins[1:]

    def _usable(self, lengths: NDArray[np.int32], counts: NDArray[np.int64]) -> NDArray[np.bool_]:
        usable: NDArray[np.bool_] = counts >= max(self._rule.min_sentences, 1)
        long = np.flatnonzero(lengths > LONG_SENTENCE)
        documents = np.searchsorted(self._ends, long, side="right")
        usable[documents[counts[documents] > 1]] = False
        return usable

    def _full_rows(
        self, sentences: NDArray[np.int64], document: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """For each sentence, where a row of full length that begins there ends."""
        closes: NDArray[np.int64] = self._ends[document]
        wanted = self._totals[:-1] + self._rule.max_length
        enough = np.flatnonzero(self._totals[closes] >= wanted)
        reach = np.searchsorted(self._totals, wanted[enough])
        reach = np.maximum(reach, sentences[enough] + self._rule.min_sentences)
        inside = reach < closes[enough] - 1  # a row leaves behind it no sentence, or two
        closes[enough[inside]] = reach[inside]
        return closes

    def rows(self, targets: _Targets) -> NDArray[np.int64]:
        """(n, 3) rows of one epoch, in the order of the sentences."""
        slot, rows = self._begin, [np.empty((0, 3), np.int64)]
        while slot < self._stop:
            visited = np.array(self._walk(slot, targets), np.int64)
            slot = int(visited[-1])
            rows.append(self._as_rows(visited, targets.take(len(visited) - 1)))
        return np.concatenate(rows)

    def _walk(self, slot: int, targets: _Targets) -> list[int]:
        """The visited slots up to the end of the block or of the current draws, then the slot to
        continue from."""
        following, document = self._next.data, self._document.data
        totals, ends = self._totals.data, self._ends.data
        fewest, stop = self._rule.min_sentences, self._stop
        visited = [slot]
        for full, target in targets.ahead():
            for _ in repeat(None, full):
                slot = following[slot]
                visited.append(slot)
            if slot == stop:
                break
            if target:
                number = document[slot]
                sentence, end = slot - number, ends[number]
                if sentence == end:
                    slot = following[slot]
                else:
                    least = sentence + fewest
                    close = bisect_left(
                        totals, totals[sentence] + target, least, max(least, end - 1)
                    )
                    slot = (close if close < end - 1 else end) + number
                visited.append(slot)
        return visited[: bisect_left(visited, stop) + 1]

    def _as_rows(self, visited: NDArray[np.int64], targets: NDArray[np.int64]) -> NDArray[np.int64]:
        document = self._document[visited[:-1]]
        begins, closes = visited[:-1] - document, visited[1:] - document
        rows = begins < self._ends[document]
        columns = (begins[rows] + self._first, closes[rows] + self._first, targets[rows])
        return np.stack(columns, axis=1)


# --- the shuffle ------------------------------------------------------------------------------


def shuffled_order(num_rows: int, seed: int) -> NDArray[np.int64]:
    """Fisher-Yates from the top, place i swapped with a 64-bit draw modulo i + 1."""
    order = np.arange(num_rows)
    twister = Twister64(seed)
    swapped = order.data
    for top in range(num_rows - 1, 0, -SWAPS_AHEAD):
        places = np.arange(top, max(top - SWAPS_AHEAD, 0), -1)
        partners = twister.draw(len(places)) % (places + 1).astype(np.uint64)
        for place, partner in zip(places.tolist(), partners.tolist(), strict=True):
            swapped[place], swapped[partner] = swapped[partner], swapped[place]
    return order


# --- the two Mersenne twisters of C++, as arrays of draws --------------------------------------
# Megatron-LM draws its mappings from std::mt19937 and std::mt19937_64, so equal mappings need equal
# streams. numpy has the first; the second is the same recurrence on words of 64 bits.

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
