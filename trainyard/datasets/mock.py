"""Documents that are made up, for runs without data: lengths, and tokens that count upwards.

Those of Megatron-LM's --mock-data: 100,000 documents of 1 to 4,095 tokens, drawn with a fixed seed;
a document of n tokens is 1, 2, ... n - 1 and the end of document."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

NUM_DOCUMENTS = 100_000
LONGEST = 4095
SEED = 0


class MockTokens:
    """A token file that lies nowhere."""

    prefix = "--mock-data"

    def __init__(
        self, vocab_size: int, eod: int, num_documents: int = NUM_DOCUMENTS, longest: int = LONGEST
    ) -> None:
        """A vocabulary too small to count so far begins again from 1."""
        self.dtype = np.dtype(np.int64)
        self.sequence_lengths = np.random.default_rng(SEED).integers(
            1, longest + 1, num_documents, np.int32
        )
        self._last = max(vocab_size - 1, 1)
        self._eod = eod

    def __len__(self) -> int:
        """Documents, each of one sequence."""
        return len(self.sequence_lengths)

    def get(self, i: int, offset: int = 0, length: int | None = None) -> NDArray[np.int64]:
        """Tokens of one document."""
        end = int(self.sequence_lengths[i])
        stop = end if length is None else min(offset + length, end)
        tokens = np.arange(offset, stop, dtype=np.int64) % self._last + 1
        if stop == end and len(tokens):
            tokens[-1] = self._eod
        return tokens
