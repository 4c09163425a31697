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
        self,
        vocab_size: int,
        eod: int,
        num_documents: int = NUM_DOCUMENTS,
        longest: int = LONGEST,
        tokens_of_a_third: int | None = None,
    ) -> None:
        """A vocabulary too small to count so far begins again from 1.

        tokens_of_a_third: the documents are three times the first ones with so many tokens."""
        self.dtype = np.dtype(np.int64)
        if tokens_of_a_third is not None:
            # Twice as many as are needed on average.
            num_documents = 4 * tokens_of_a_third // longest + 64
        lengths = np.random.default_rng(SEED).integers(1, longest + 1, num_documents, np.int32)
        if tokens_of_a_third is not None:
            lengths = np.tile(_first_tokens(lengths, tokens_of_a_third), 3)
        self.sequence_lengths = lengths
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


def _first_tokens(lengths: NDArray[np.int32], num_tokens: int) -> NDArray[np.int32]:
    """The first documents with so many tokens; the last of them is cut short."""
    ends = np.cumsum(lengths, dtype=np.int64)
    assert num_tokens <= ends[-1]
    last = int(np.searchsorted(ends, num_tokens))
    first = lengths[: last + 1].copy()
    first[last] -= ends[last] - num_tokens
    return first
