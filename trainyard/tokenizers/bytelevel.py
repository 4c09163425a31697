"""ByteLevelTokenizer: every byte of the text's UTF-8 is its own id.

As in Megatron-LM's library, there are 512 ids by default (`--vocab-size`), id 0 ends a document and
id 1 pads. `--tokenizer-special-tokens` come after them, the last one first, and are not recognised
in a text. Unlike there, decoded text keeps the spaces at its end."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from trainyard.errors import ConfigError
from trainyard.tokenizers.base import Flat, description
from trainyard.tokenizers.carried import DESCRIPTION
from trainyard.tokenizers.config import TokenizerConfig

NUM_BYTES = 256
USUAL_SIZE = 512


class ByteLevelTokenizer:
    """Ids 0 to 255 are bytes."""

    engine = "bytes"
    releases_gil = False

    def __init__(self, config: TokenizerConfig) -> None:
        size = USUAL_SIZE if config.vocab_size is None else config.vocab_size
        if size < NUM_BYTES:
            raise ConfigError(f"--vocab-size {size}: ByteLevelTokenizer needs at least {NUM_BYTES}")
        special = config.tokenizer_special_tokens
        self.config = config
        self.vocab_size = size + len(special)
        self.special_ids = {token: self.vocab_size - 1 - k for k, token in enumerate(special)}
        self.eod = 0
        self.pad: int | None = 1
        self._special = {i: token.encode() for token, i in self.special_ids.items()}

    def encode(self, text: str) -> list[int]:
        """The bytes of a text."""
        return list(text.encode())

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The bytes of several texts, in order."""
        return [self.encode(text) for text in texts]

    def encode_flat(self, texts: Sequence[str]) -> Flat:
        """The bytes of several texts as arrays."""
        encoded = [text.encode() for text in texts]
        bounds = np.zeros(len(encoded) + 1, np.int64)
        np.cumsum(np.fromiter(map(len, encoded), np.int64, len(encoded)), out=bounds[1:])
        return np.frombuffer(b"".join(encoded), np.uint8).astype(np.uint32), bounds

    def encode_reference(self, text: str) -> list[int]:
        """The same as `encode`: there is no other library."""
        return self.encode(text)

    def reference_array(self, text: str) -> NDArray[np.uint32]:
        """The same as an array."""
        return self.encode_flat([text])[0]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some ids; drops ids without a meaning and invalid UTF-8."""
        parts = (bytes([i]) if i < NUM_BYTES else self._special.get(i, b"") for i in ids)
        return b"".join(parts).decode(errors="ignore")

    def files(self) -> dict[str, bytes]:
        """Only the description."""
        return {DESCRIPTION: description(self.config)}
