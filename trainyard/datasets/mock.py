"""Generates documents for runs without data: random lengths, and tokens that count upwards.

They are those of Megatron-LM's --mock-data: 100,000 documents of 1 to 4,095 tokens, drawn with a
fixed seed. A document of n tokens is 1, 2, ... n - 1 and the end of document."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

NUM_DOCUMENTS = 100_000
LONGEST = 4095
SEED = 0


class MockTokens:
    """A token file in memory."""

    prefix = "--mock-data"

    def __init__(
        self,
        vocab_size: int,
        eod: int,
        num_documents: int = NUM_DOCUMENTS,
        longest: int = LONGEST,
        tokens_of_a_third: int | None = None,
    ) -> None:
        """If the vocabulary is too small, tokens count from 1 again.

        tokens_of_a_third: take the first documents with this many tokens, three times."""
        self.dtype = np.dtype(np.int64)
        if tokens_of_a_third is not None:
            # Twice as many documents as needed on average.
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
    """Lengths of the first documents with `num_tokens` tokens; the last one is shortened."""
    ends = np.cumsum(lengths, dtype=np.int64)
    assert num_tokens <= ends[-1]
    last = int(np.searchsorted(ends, num_tokens))
    first = lengths[: last + 1].copy()
    first[last] -= ends[last] - num_tokens
    return first
