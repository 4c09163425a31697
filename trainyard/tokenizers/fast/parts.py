"""Long texts in parts, for libraries that hold a hundred bytes for every token of a text.

Where a text may be cut its tokenizer says (seams.py), by a pattern that matches an empty string."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from trainyard.tokenizers.fast.seams import Seam

PART_LETTERS = 1 << 18
"""At least 1: a quarter of a megabyte of English, and a whole one at most."""

SPACE_SEAM = re.compile(r"(?<=[A-Za-z])(?= [A-Za-z])")
"""Before a single space between words, where a SentencePiece model without pieces of several words
cuts them."""


def parts(text: str, seam: Seam, letters: int | None = None) -> Iterator[str]:
    """The text in order; a part is longer than `letters`, or `PART_LETTERS`, where there is nowhere
    to cut it."""
    letters = PART_LETTERS if letters is None else letters
    assert letters > 0, "a part without a letter would be cut off without end"
    start = 0
    while start < len(text):
        found = seam.search(text, start + letters)
        end = found.start() if found else len(text)
        yield text[start:end]
        start = end


def any_long(texts: Iterable[str]) -> bool:
    """Whether one of them had better be encoded in parts."""
    return any(len(text) > PART_LETTERS for text in texts)


def encode_in_parts(
    texts: Sequence[str], encode: Callable[[Sequence[str]], list[list[int]]], seam: Seam | None
) -> list[NDArray[np.uint32]]:
    """The ids of a few texts at the memory of one part at a time, or of one text without a seam."""
    rows = []
    for text in texts:
        cut = parts(text, seam) if seam else [text]
        ids = [np.array(encode([part])[0], np.uint32) for part in cut]
        rows.append(np.concatenate(ids) if ids else np.zeros(0, np.uint32))
    return rows
