"""Texts that end an output, and tokens that may not follow others. No torch.

Stop words are found in the text and not in the tokens, since a tokenizer may join the end of a word
with what follows."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from trainyard.tokenizers.base import Tokenizer

INCOMPLETE = "\ufffd"
"""Decoded from the first bytes of a character."""

EMPTY_TOKENS = 8
"""Tokens that may decode to nothing within a stop word."""


class StopWords:
    """Whether an output ends with a text that holds a stop word, and the text before it."""

    def __init__(self, tokenizer: Tokenizer, words: Sequence[str]) -> None:
        self._decode, self.words = tokenizer.decode, tuple(words)
        # A token other than an empty one has at least a byte.
        self._reach = max(len(word.encode()) for word in words) + EMPTY_TOKENS

    def __call__(self, tokens: Sequence[int]) -> bool:
        """Whether the last token completes a stop word."""
        return self._begin(tokens[-self._reach :]) is not None

    def cut(self, tokens: Sequence[int]) -> str:
        """The text of an output without the stop word that its last token completed."""
        text = self._decode(list(tokens))
        begin = self._begin(tokens)
        return text if begin is None else text[:begin]

    def _begin(self, tokens: Sequence[int]) -> int | None:
        """Where the first stop word that the last token completed begins in the text."""
        before = len(self._decode(list(tokens[:-1])).rstrip(INCOMPLETE))
        return find_stop(self._decode(list(tokens)), before, self.words)


def find_stop(text: str, before: int, words: Sequence[str]) -> int | None:
    """Where the first of the words begins that ends behind the first `before` characters."""
    places = (text.find(word, max(before - len(word) + 1, 0)) for word in words)
    return min((place for place in places if place >= 0), default=None)


class LineEnds:
    """The tokens that may not follow a token with --prevent-newline-after-colon: behind a colon,
    those whose text begins with the end of a line."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def __call__(self, token: int) -> Sequence[int]:
        """Those that may not follow this one."""
        return self._banned if self._tokenizer.decode([token]).endswith(":") else ()

    @cached_property
    def _banned(self) -> tuple[int, ...]:
        decode = self._tokenizer.decode
        ids = range(self._tokenizer.vocab_size)
        return tuple(token for token in ids if decode([token]).startswith("\n"))
