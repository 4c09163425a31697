"""Chunks of a database that repeat text of evaluation sets.

A chunk repeats an evaluation set if a run of w of its tokens, at any place, occurs in one of the
set's documents. Runs are compared by hashes of 64 bits."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainyard.corpus.indexed import IndexedDataset
from trainyard.retrieval.chunk_database import ChunkDatabase

log = logging.getLogger(__name__)

Hashes = NDArray[np.uint64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

FACTOR = np.uint64(0x9E3779B97F4A7C15)
MIX = np.uint64(0xFF51AFD7ED558CCD)

CHUNKS_AT_ONCE = 1 << 14
TOKENS_AT_ONCE = 1 << 20

BITS_PER_HASH = 16
"""Of a table that tells nearly all other hashes before they are searched for."""


def run_hashes(tokens: NDArray[Any], length: int) -> Hashes:
    """(n - length + 1,) a hash of each run of that many tokens; empty for fewer tokens."""
    count = max(len(tokens) - length + 1, 0)
    wide = tokens.astype(np.int64).view(np.uint64) + np.uint64(1)
    found = np.zeros(count, np.uint64)
    for place in range(length if count else 0):
        found *= FACTOR
        found += wide[place : place + count]
    found ^= found >> np.uint64(33)
    found *= MIX
    found ^= found >> np.uint64(29)
    return found


class RunsOfTokens:
    """The runs of tokens of some documents."""

    def __init__(self, files: Sequence[IndexedDataset], length: int) -> None:
        self.length = length
        self.num_short = 0
        """Documents of fewer tokens, which nothing is compared with."""
        parts = [part for file in files for part in self._of(file)]
        self._hashes = np.unique(np.concatenate(parts)) if parts else np.zeros(0, np.uint64)
        bits = max(int(len(self._hashes) * BITS_PER_HASH).bit_length(), 10)
        self._shift = np.uint64(64 - bits)
        self._table = np.zeros(1 << bits, np.bool_)
        self._table[self._hashes >> self._shift] = True

    def __len__(self) -> int:
        return len(self._hashes)

    def _of(self, file: IndexedDataset) -> list[Hashes]:
        bounds = file.document_places(np.arange(file.num_documents + 1))
        self.num_short += int((np.diff(bounds) < self.length).sum())
        parts = []
        for start in range(0, int(bounds[-1]), TOKENS_AT_ONCE):
            stop = min(start + TOKENS_AT_ONCE + self.length - 1, int(bounds[-1]))
            hashes = run_hashes(file.get_flat(start, stop), self.length)
            places = np.arange(start, start + len(hashes))
            ends = bounds[np.searchsorted(bounds, places, "right")]
            parts.append(hashes[places + self.length <= ends])
        return parts

    def among(self, hashes: Hashes) -> Bools:
        """(n,) whether each hash is one of these."""
        is_there: Bools = self._table[hashes >> self._shift]
        likely = np.flatnonzero(is_there)
        if len(likely):
            places = np.searchsorted(self._hashes, hashes[likely])
            places = np.minimum(places, len(self._hashes) - 1)
            is_there[likely] = self._hashes[places] == hashes[likely]
        return is_there


def repeating_chunks(database: ChunkDatabase, runs: RunsOfTokens) -> Bools:
    """(chunks,) whether each chunk of the database has one of these runs.

    Reads every token of the database once."""
    found = np.zeros(len(database), np.bool_)
    for start in range(0, len(database), CHUNKS_AT_ONCE):
        numbers = np.arange(start, min(start + CHUNKS_AT_ONCE, len(database)))
        for first, last, tokens, begins, ends in database.flat_ranges(numbers):
            found[first:last] = _has_run(runs, tokens, begins, ends)
    return found


def _has_run(runs: RunsOfTokens, tokens: NDArray[Any], begins: Ints, ends: Ints) -> Bools:
    """(n,) for chunks of `tokens`."""
    hits = runs.among(run_hashes(tokens, runs.length))
    before = np.concatenate(([0], np.cumsum(hits)))
    # The runs that begin in a chunk and end in it.
    stops = np.clip(ends - runs.length + 1, begins, len(hits))
    starts = np.minimum(begins, len(hits))
    has_run: Bools = before[np.maximum(stops, starts)] > before[starts]
    return has_run
