"""Texts with words of megabytes, such as a genome: in windows, which together make the ids of the
whole.

A library holds 20 to 30 bytes for each of a word. Byte-pair encoding joins, again and again, the
pair of lowest rank, the leftmost of several. Whatever the ranks are, two laws follow.

1. What lies left of a border between two tokens of a word, and what lies right of it, make the
   same tokens by themselves: no join crosses the border, and those of one side come in the order in
   which they come without the other.
2. Tokens of which every two neighbours are what their own text makes are what the whole text makes.
   Let there be a first join across a border. Until then each of the two tokens at the border was
   joined as by itself, one pair before the other by rank and place, as in the text of the two
   alone; and the lowest pair of all is the lowest of these two: so it would be joined there too.

Windows of a word that overlap can thus be put together at any token that both have in the same
place: every two neighbours of the outcome stand side by side in one of them. The second window
begins at a border between tokens of the first, so that what repeats itself repeats itself in step.

Windows begin and end within rows of letters that make one word whatever their number (seams.py);
the words around are then the same in a window as in the text."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

WINDOW_LETTERS = 1 << 18
OVERLAP_LETTERS = 1 << 10
"""Longer than any token: a row that long is no token by itself."""

Ids = NDArray[np.uint32]
Encode = Callable[[int, int], Ids]
"""The ids of the text from one place up to another, as they are within the text."""


def lengths_of(tokens: Mapping[int, bytes], letters: str) -> NDArray[np.int64] | None:
    """The bytes of each token; None where windows cannot be told apart by them: a letter is no
    token, or a token is as long as an overlap."""
    row = re.compile(f"[{letters}]")
    single = {token.decode() for token in tokens.values() if len(token) == 1 and token < b"\x80"}
    lengths = np.zeros(max(tokens, default=-1) + 1, np.int64)
    lengths[list(tokens)] = list(map(len, tokens.values()))
    known = all(chr(i) in single for i in range(128) if row.match(chr(i)))
    return lengths if known and lengths.max(initial=0) < OVERLAP_LETTERS else None


class Unbroken:
    """Finds and encodes such texts; `letters` is the class of those that keep together, `lengths`
    the bytes of each token."""

    def __init__(self, letters: str, lengths: NDArray[np.int64]) -> None:
        self._row = re.compile(f"[{letters}]{{{2 * OVERLAP_LETTERS}}}")
        self._lengths = lengths

    def cuts(self, text: str) -> list[int]:
        """Where windows may end: rows go on on both sides."""
        ends = range(WINDOW_LETTERS, len(text) - OVERLAP_LETTERS, WINDOW_LETTERS)
        return [end for end in ends if self._row.match(text, end - OVERLAP_LETTERS)]

    def encode(self, text: str, cuts: Sequence[int], encode: Encode) -> Ids:
        """What `encode` makes of a text, which is asked for a window at a time."""
        out = np.empty(0, np.uint32)
        filled = 0
        ids = encode(0, cuts[0])
        for end, following in pairwise([*cuts, len(text)]):
            tail = self._tail(ids, end)
            begin = end - int(self._lengths[ids[tail:]].sum())
            more = encode(begin, following)
            common = _common(ids[tail:], more, self._lengths)
            if common is None:
                return encode(0, len(text))
            kept, dropped = common
            out = _extend(out, filled, ids[: tail + kept], len(text), end)
            filled += tail + kept
            ids = more[dropped:]
        out = _extend(out, filled, ids, len(text), len(text))
        return out[: filled + len(ids)]

    def _tail(self, ids: Ids, end: int) -> int:
        """The last token that begins at least an overlap before the end."""
        behind = np.cumsum(self._lengths[ids[-OVERLAP_LETTERS:]][::-1])
        return len(ids) - 1 - int(np.searchsorted(behind, OVERLAP_LETTERS))


def _common(a: Ids, b: Ids, lengths: NDArray[np.int64]) -> tuple[int, int] | None:
    """Numbers of the first token that two rows from one place on have in the same place."""
    b = b[: 2 * OVERLAP_LETTERS]  # behind the row there may be added tokens, of no length here
    here, there = (np.cumsum(lengths.take(row, mode="clip")) << 32 | row for row in (a, b))
    _, first, second = np.intersect1d(here, there, assume_unique=True, return_indices=True)
    return (int(first[0]), int(second[0])) if len(first) else None


def _extend(out: Ids, filled: int, ids: Ids, total: int, done: int) -> Ids:
    """`out` with more ids, grown by what is to be expected: pages that are not written to are not
    there."""
    wanted = filled + len(ids)
    if wanted > len(out):
        grown = np.empty(max(wanted, min(4 * total, wanted * total // done * 9 // 8)), np.uint32)
        grown[:filled] = out[:filled]
        out = grown
    out[filled:wanted] = ids
    return out
