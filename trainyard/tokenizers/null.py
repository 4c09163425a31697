"""NullTokenizer: the text is the ids, written as numbers with spaces between them."""

from __future__ import annotations

from collections.abc import Sequence

from trainyard.errors import DataError
from trainyard.tokenizers.base import DESCRIPTION, description
from trainyard.tokenizers.config import TokenizerConfig


class NullTokenizer:
    """Ids 0 to `--vocab-size` - 1, the last of which ends a document."""

    def __init__(self, config: TokenizerConfig) -> None:
        assert config.vocab_size is not None
        self.config = config
        self.vocab_size = config.vocab_size
        self.eod = config.vocab_size - 1
        self.pad: int | None = None

    def encode(self, text: str) -> list[int]:
        """The numbers in a text."""
        ids = []
        for word in text.split():
            if not (word.isascii() and word.isdigit() and int(word) < self.vocab_size):
                raise DataError(
                    f"{word[:40]!r} is not an id: NullTokenizer reads 0 to {self.vocab_size - 1}"
                )
            ids.append(int(word))
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The numbers in several texts, in order."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """The ids as numbers."""
        return " ".join(map(str, ids))

    def files(self) -> dict[str, bytes]:
        """Nothing but the description."""
        return {DESCRIPTION: description(self.config)}
