"""NullTokenizer: the text is the ids, written as numbers with spaces between them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from trainyard.errors import DataError
from trainyard.tokenizers.base import Flat, description, flatten
from trainyard.tokenizers.carried import DESCRIPTION
from trainyard.tokenizers.config import TokenizerConfig

MAX_DIGITS = 18
"""Any number with this many digits fits into 64 bits."""


class NullTokenizer:
    """Ids 0 to `--vocab-size` - 1; the last one ends a document.

    As in Megatron-LM's newest version; 0.15 had one id more, which was the end."""

    engine = "numbers"
    releases_gil = False

    def __init__(self, config: TokenizerConfig) -> None:
        assert config.vocab_size is not None
        self.config = config
        self.vocab_size = config.vocab_size
        self.eod = config.vocab_size - 1
        self.pad: int | None = None

    def encode(self, text: str) -> list[int]:
        """The numbers in a text."""
        return [self._id(word) for word in text.split()]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The numbers in several texts, in order."""
        return [self.encode(text) for text in texts]

    def encode_flat(self, texts: Sequence[str]) -> Flat:
        """The numbers in several texts as arrays."""
        rows = [text.split() for text in texts]
        words = list(chain.from_iterable(rows))
        joined = " ".join(words)
        plain = joined.isascii() and joined.replace(" ", "0").isdigit()
        if not plain or max(map(len, words)) > MAX_DIGITS:
            return flatten(self.encode_batch(texts))
        ids = np.fromstring(joined, np.int64, sep=" ")
        if ids.max() >= self.vocab_size:
            return flatten(self.encode_batch(texts))  # raises an error that names the word
        bounds = np.zeros(len(rows) + 1, np.int64)
        np.cumsum(np.fromiter(map(len, rows), np.int64, len(rows)), out=bounds[1:])
        return ids.astype(np.uint32), bounds

    def encode_reference(self, text: str) -> list[int]:
        """The same as `encode`: there is no other library."""
        return self.encode(text)

    def reference_array(self, text: str) -> NDArray[np.uint32]:
        """The same as an array."""
        return np.array(self.encode_reference(text), np.uint32)

    def decode(self, ids: Sequence[int]) -> str:
        """The ids as numbers."""
        return " ".join(map(str, ids))

    def files(self) -> dict[str, bytes]:
        """Only the description."""
        return {DESCRIPTION: description(self.config)}

    def _id(self, word: str) -> int:
        # Digits are counted first: Python refuses to read numbers of thousands of them.
        if word.isascii() and word.isdigit() and len(word.lstrip("0")) <= MAX_DIGITS:
            found = int(word[-MAX_DIGITS:])
            if found < self.vocab_size:
                return found
        raise DataError(
            f"{word[:40]!r} is not an id: NullTokenizer reads 0 to {self.vocab_size - 1}"
        )
