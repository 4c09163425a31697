"""Pieces of text as tokens: without the special tokens that a tokenizer puts around a whole one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Protocol


class Detokenizer(Protocol):
    """The part of a tokenizer that is used."""

    @property
    def eod(self) -> int:
        """Id that ends a document."""

    def encode(self, text: str) -> list[int]:
        """The ids of a text."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some ids."""


class PlainText:
    """A tokenizer whose BOS and the like have no place within a text."""

    def __init__(self, tokenizer: Detokenizer) -> None:
        self._tokenizer = tokenizer
        around, example = tokenizer.encode(""), tokenizer.encode("a")
        pairs = takewhile(lambda pair: pair[0] == pair[1], zip(around, example, strict=False))
        self.before = [first for first, _ in pairs]
        """The tokens before a whole text, such as a BOS."""
        self._num_behind = len(around) - len(self.before)

    def encode(self, text: str) -> list[int]:
        """The ids of a piece of text."""
        if not text:
            return []
        ids = self._tokenizer.encode(text)
        return ids[len(self.before) : len(ids) - self._num_behind]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some ids."""
        return self._tokenizer.decode(ids)
