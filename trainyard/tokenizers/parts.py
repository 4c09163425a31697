"""Long texts in parts, for libraries that hold a hundred bytes for every token of a text.

A text is cut before a single space between two ASCII letters, where every way of cutting text into
words that is used with this (GPT-2's and its descendants', BERT's) begins a new word anyway."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

PART_LETTERS = 1 << 20

SEAM = re.compile(r"(?<=[A-Za-z])(?= [A-Za-z])")


def separable(special_tokens: Iterable[str]) -> bool:
    """Whether none of these tokens may lie across a cut."""
    return not any(SEAM.search(token) for token in special_tokens)


def parts(text: str) -> Iterator[str]:
    """The text in order; a part is longer than `PART_LETTERS` where there is nowhere to cut it."""
    start = 0
    while start < len(text):
        seam = SEAM.search(text, start + PART_LETTERS)
        end = seam.start() if seam else len(text)
        yield text[start:end]
        start = end


def any_long(texts: Iterable[str]) -> bool:
    """Whether one of them had better be encoded in parts."""
    return any(len(text) > PART_LETTERS for text in texts)


def encode_in_parts(
    texts: Sequence[str], encode: Callable[[Sequence[str]], list[list[int]]]
) -> list[NDArray[np.uint32]]:
    """The ids of a few texts at the memory of one part at a time."""
    rows = []
    for text in texts:
        ids = [np.array(encode([part])[0], np.uint32) for part in parts(text)]
        rows.append(np.concatenate(ids) if ids else np.zeros(0, np.uint32))
    return rows
