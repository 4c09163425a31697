"""Texts with words of megabytes, such as a genome: in windows, which together make the ids of the
whole.

A library holds 20 to 40 bytes for each of a word. Byte-pair encoding joins, again and again, the
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

Windows begin and end within rows of characters that make one word whatever their number (rows.py);
the words around are then the same in a window as in the text. Where there is a seam (seams.py) a
window ends there, and the next has nothing in common with it.

Places in a text are counted in characters, those in tokens in bytes of UTF-8; a token may begin
within a character."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from trainyard.tokenizers.fast.rows import Finder, Rows
from trainyard.tokenizers.fast.seams import Seam

WINDOW_LETTERS = 1 << 18
OVERLAP_LETTERS = 1 << 10
"""A row goes on for that many around the end of a window; the next begins half as many before."""

Ids = NDArray[np.uint32]
Encode = Callable[[int, int], Ids]
"""The ids of the text from one place up to another, as they are within the text."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Where a window ends: at a seam, or within a row."""

    place: int
    is_seam: bool


@dataclass(frozen=True, slots=True)
class Lengths:
    """Of every token, by its id: 0 for those of no known bytes."""

    bytes_: NDArray[np.int64]
    characters: NDArray[np.int64]
    """How many begin in it."""
    heads: NDArray[np.int64]
    """How many of its bytes come before the first of those."""

    @classmethod
    def of(cls, tokens: Mapping[int, bytes]) -> Lengths | None:
        """None where windows cannot be told apart by them: a byte is no token, or a token is as
        long as a quarter of an overlap."""
        total = max(tokens, default=-1) + 1
        lengths = cls(*(np.zeros(total, np.int64) for _ in range(3)))
        for i, token in tokens.items():
            begins = [k for k, byte in enumerate(token) if byte & 0xC0 != 0x80]
            lengths.bytes_[i] = len(token)
            lengths.characters[i] = len(begins)
            lengths.heads[i] = begins[0] if begins else len(token)
        known = len({token for token in tokens.values() if len(token) == 1}) == 256
        short = lengths.bytes_.max(initial=0) <= OVERLAP_LETTERS // 4
        return lengths if known and short else None


class Unbroken:
    """Finds and encodes such texts."""

    def __init__(self, rows: Rows, lengths: Lengths, seam: Seam | None = None) -> None:
        self._rows = rows
        self._lengths = lengths
        self._seam = seam

    def cuts(self, text: str) -> list[Cut]:
        """Where windows may end."""
        finder = Finder(self._rows, text, OVERLAP_LETTERS)
        ends = range(WINDOW_LETTERS, len(text) - OVERLAP_LETTERS, WINDOW_LETTERS)
        return [cut for end in ends if (cut := self._cut(text, end, finder))]

    def _cut(self, text: str, end: int, finder: Finder) -> Cut | None:
        found = self._seam.search(text, end, end + OVERLAP_LETTERS) if self._seam else None
        if found:
            return Cut(found.start(), True)
        place = finder.find(end)
        return None if place is None else Cut(place, False)

    def encode(self, text: str, cuts: Sequence[Cut], encode: Encode) -> Ids:
        """What `encode` makes of a text, which is asked for a window at a time."""
        out, filled, start = np.empty(0, np.uint32), 0, 0
        within: list[int] = []
        for cut in (*cuts, Cut(len(text), True)):
            if not cut.is_seam:
                within.append(cut.place)
                continue
            before = filled
            for ids, done in self._joined([start, *within, cut.place], encode):
                if ids is None:
                    filled = before
                    ids = encode(start, cut.place)
                out = _extend(out, filled, ids, len(text), done)
                filled += len(ids)
            start, within = cut.place, []
        return out[:filled]

    def _joined(self, ends: Sequence[int], encode: Encode) -> Iterator[tuple[Ids | None, int]]:
        """The ids between two seams, from windows, and up to where they were made; None for ids
        where windows have nothing in common: then the whole is to be encoded."""
        ids = encode(ends[0], ends[1])
        for end, following in pairwise(ends[1:]):
            first, begin, ahead = self._begin(ids, end)
            more = encode(begin, following)
            common = self._common(ids[first:], more, ahead)
            if common is None:
                yield None, ends[-1]
                return
            yield ids[: first + common[0]], end
            ids = more[common[1] :]
        yield ids, ends[-1]

    def _begin(self, ids: Ids, end: int) -> tuple[int, int, int]:
        """Where the window behind one that ends there begins: number of the token, place of the
        first character that begins in it, and bytes of the token before that, usually none."""
        tail = ids[-2 * OVERLAP_LETTERS :]  # half as many characters of four bytes
        begun = self._lengths.characters.take(tail, mode="clip")
        behind = np.cumsum(begun[::-1])[::-1]
        near = np.flatnonzero((behind <= OVERLAP_LETTERS // 2) & (begun > 0))
        heads = self._lengths.heads[tail[near]]
        k = int(np.argmin(heads > 0))  # the first that begins with a character, else the first
        return len(ids) - len(tail) + int(near[k]), end - int(behind[near[k]]), int(heads[k])

    def _common(self, a: Ids, b: Ids, ahead: int) -> tuple[int, int] | None:
        """Numbers of the first token that two rows have in the same place; the second row begins
        some bytes ahead."""
        b = b[: 2 * OVERLAP_LETTERS]  # behind there may be added tokens, of no length here
        places = (np.cumsum(self._lengths.bytes_.take(row, mode="clip")) for row in (a, b))
        here, there = next(places) << 32 | a, next(places) + ahead << 32 | b
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
