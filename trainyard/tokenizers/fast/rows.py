r"""Rows of characters that keep together: any number of them in a row lies in one word, and any
part of the row by itself is one. Within a row a window of a text may begin and end (unbroken.py).

Which those are is told by the classes of Unicode, since the known patterns (seams.py) ask for no
more: letters are taken by `\p{L}+`, numbers by `\p{N}+` where there is one (`\p{N}{1,3}` cuts them
short by itself), marks of all kinds by `[^\s\p{L}\p{N}]+`. A row lies deep within a word: nothing
that these patterns look for at the beginning or end of one, as contractions, is near a window's
end.

Blanks are taken by `\s+(?!\S)`, the last but one of them included. Patterns with `\s*[\r\n]+` take
blanks up to the last line break before that, however far away it is. There a window must not end
between two line breaks of a run unless behind one; nor begin among those that a mark before the run
has taken (`[^\s\p{L}\p{N}]+[\r\n]*`)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce
from operator import and_
from unicodedata import category

import numpy as np

from trainyard.tokenizers.fast.unicode_mismatch import changed_by_nfc

BLANKS = "\t\n\x0b\x0c\r \x85\xa0\u1680" + "".join(map(chr, range(0x2000, 0x200B)))
BLANKS += "\u2028\u2029\u202f\u205f\u3000"
r"""What `\s` takes: Python's takes four more, which are in no row."""
BREAKS = "\r\n"
ENDS = re.compile(f"[{BREAKS}]|[^{BLANKS}]")
CHUNK = 1 << 16
LONG = 256
"""An added token of more characters might reach deep into a row."""
DOUBTFUL = frozenset("\x1c\x1d\x1e\x1f\u180e")
"""Blanks to some libraries and not to others."""

LETTERS = frozenset(("Lu", "Ll", "Lt", "Lm", "Lo"))
LOWER = frozenset(("Ll",))
NUMBERS = frozenset(("Nd", "Nl", "No"))
MARKS = frozenset(("Pc", "Pd", "Ps", "Pe", "Pi", "Pf", "Po", "Sm", "Sc", "Sk", "So"))
OTHER_MARKS = frozenset(("Mn", "Mc", "Me", "Cf", "Cc", "Co"))
"""Those that some patterns take for marks and some for parts of a letter, or leave alone."""

ALL_NUMBERS = {r"\p{N}+", r" ?\p{N}+"}
ALL_MARKS = {
    *(r" ?[^\s\p{L}\p{N}]+", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{N}]+[\r\n/]*"),
    *(r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*", r" ?[\p{P}\p{S}]+[\r\n]*"),
}
ALL_BLANKS = {r"\s+(?!\S)", r"\s+"}


@dataclass(frozen=True, slots=True)
class Rows:
    """Which rows keep together.

    kinds: sets of classes, all characters of a row being of one set; `apart`: characters that are
    in none; `blanks`: whether rows of blanks do; `breaks`: whether line breaks among them count;
    `nfc`: leave out what NFC may change; `all`: whatever there is, since nothing is cut into words.
    """

    kinds: tuple[frozenset[str], ...] = ()
    apart: frozenset[str] = frozenset()
    blanks: bool = False
    breaks: bool = False
    nfc: bool = False
    all: bool = False

    def without(self, tokens: Iterable[str]) -> Rows:
        """The same without the kinds of rows in which one of these added tokens may be found."""
        found = [token for token in tokens if token]
        if max(map(len, found), default=0) > LONG:
            return Rows()
        kinds = [k for k in self.kinds if not any(self._one_of(k, set(t)) for t in found)]
        blanks = self.blanks and not any(set(token) <= set(BLANKS) for token in found)
        return Rows(tuple(kinds), self.apart, blanks, self.breaks, self.nfc)

    def holds(self, row: str) -> bool:
        """Whether these characters, none of them a blank, keep together."""
        found = set(row)
        if not found.isdisjoint(self.apart | DOUBTFUL) or not found.isdisjoint(BLANKS):
            return False
        if self.nfc and changed_by_nfc()[np.fromiter(map(ord, found), np.int64)].any():
            return False
        return any(self._one_of(kind, found) for kind in self.kinds)

    @staticmethod
    def _one_of(kind: frozenset[str], characters: set[str]) -> bool:
        return kind.issuperset(map(category, characters))


ALL = Rows(all=True)


def rows_of(patterns: Iterable[frozenset[str]], *, digits: bool, ideographs: bool) -> Rows:
    """What keeps together under each of some patterns, sets of their alternatives; `digits` and
    `ideographs`: whether these are cut apart in another way."""
    every = [_rows_of(found) for found in patterns]
    kinds = reduce(and_, (set(rows.kinds) for rows in every))
    if digits:
        kinds.discard(NUMBERS)
    if ideographs:
        kinds.discard(LETTERS)
    return Rows(
        tuple(sorted(kinds, key=sorted)),
        frozenset[str]().union(*(rows.apart for rows in every)),
        all(rows.blanks for rows in every),
        any(rows.breaks for rows in every),
    )


def _rows_of(found: frozenset[str]) -> Rows:
    whole = "|".join(found)
    kinds = []
    if "A-Za-z" not in whole:  # one that takes these alone, and leaves the next letter to another
        kinds.append(LOWER if r"\p{Lu}" in whole else LETTERS)
    if found & ALL_NUMBERS:
        kinds.append(NUMBERS)
    if found & ALL_MARKS:
        plain = r"\p{M}" not in whole and r"\p{P}" not in whole
        kinds.append(MARKS | OTHER_MARKS if plain else MARKS)
    return Rows(
        tuple(kinds),
        frozenset("/" if "/]" in whole else ""),
        found >= ALL_BLANKS and r"\s+$" not in found,
        r"[\r\n]" in whole,
    )


class Finder:
    """Finds where windows of one text may end, asked for ascending places."""

    def __init__(self, rows: Rows, text: str, overlap: int) -> None:
        self._rows, self._text, self._overlap = rows, text, overlap
        self._seen = 0
        """Up to where the text is known: """
        self._broken = False
        """whether the run of blanks that ends there has a line break,"""
        self._before = " "
        """and what stands before the line breaks that end there."""
        self._ahead, self._ahead_is_break = 0, False
        """The next line break, or the end of the run of blanks if that comes first."""

    def find(self, end: int) -> int | None:
        """Where a row goes on for an overlap to both sides (a quarter less to the left): `end`, or
        a little before; None where it does not."""
        if self._rows.all:
            return end
        row = self._text[end - self._overlap : end + self._overlap]
        if row[0] not in BLANKS:
            return end if self._rows.holds(row) else None
        if not self._rows.blanks or row.strip(BLANKS):
            return None
        return self._among_blanks(row, end) if self._rows.breaks else end

    def _among_blanks(self, row: str, end: int) -> int | None:
        quarter = self._overlap // 4
        if not any(mark in row for mark in BREAKS):
            self._look_back(end)
            return None if self._broken and self._is_break_ahead(end) else end
        if not row[:quarter].strip(BREAKS):
            self._look_back(end - self._overlap + quarter)
            if category(self._before)[0] not in "LN" and self._before not in BLANKS:
                return None
        last = max(row.rfind(mark, 0, self._overlap) for mark in BREAKS)
        found = end - self._overlap + last + 1
        return found if found >= end - quarter else None

    def _look_back(self, place: int) -> None:
        blanks = self._start_of(BLANKS, place)
        broken = any(self._text.find(mark, blanks, place) >= 0 for mark in BREAKS)
        self._broken = broken or (blanks == self._seen and self._broken)
        breaks = self._start_of(BREAKS, place)
        if breaks > self._seen:
            self._before = self._text[breaks - 1]
        self._seen = place

    def _start_of(self, what: str, place: int) -> int:
        """Where the run of these characters begins that ends at a place, of what is not known."""
        while place > self._seen:
            start = max(self._seen, place - CHUNK)
            kept = len(self._text[start:place].rstrip(what))
            if kept:
                return start + kept
            place = start
        return place

    def _is_break_ahead(self, place: int) -> bool:
        if place >= self._ahead:
            found = ENDS.search(self._text, place)
            self._ahead = found.start() if found else len(self._text)
            self._ahead_is_break = bool(found and found[0] in BREAKS)
        return self._ahead_is_break
