"""Finds texts that two libraries may split differently, as they have different versions of Unicode.

Splitting depends on a character's class (letter, number, mark), and NFC on its combining class.
Both never change once a character is assigned. A character that is not assigned yet is "other" to
the older library and perhaps a letter to the newer one. So a text is suspect if it has a character
that is unassigned in Python's own tables, which are no newer than either library's. If the
tokenizer normalizes, a text that NFC changes is suspect too.

Checking every character would cost as much as encoding, so the ids are checked first. Only a token
with the first two bytes of such a character, or one that ends after the first, makes a text worth
reading."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import chain

import numpy as np
from numpy.typing import NDArray

NUM_CODE_POINTS = 0x110000
SURROGATES = slice(0xD800, 0xE000)
SURVEYED = (range(0x40000), range(0xE0000, 0xE1000))
"""The ranges that have assigned characters; all between them has always been empty."""

PRIVATE = slice(0xF0000, None)
LETTERS_FOR_NFC = (
    range(0x3400),
    range(0xA000, 0xAC00),
    range(0xD7A4, 0x17000),
    range(0x18D80, 0x20000),
    range(0x2F800, 0x2FA20),
)
"""All code points except ideographs and composed Hangul syllables, which NFC does not change."""

CHUNK = 1 << 20
"""Characters checked at once: a document may be hundreds of megabytes long."""

IDS = 1 << 14
"""Ids checked at once: what numpy makes of them stays in the processor's cache."""

ASCII = re.compile(r"[\0-\x7f]")
"""NFC joins none of these to the character before it."""


@cache
def unassigned() -> NDArray[np.bool_]:
    """For every code point, whether it is unassigned."""
    table = np.ones(NUM_CODE_POINTS, np.bool_)
    for part in SURVEYED:
        categories = map(unicodedata.category, map(chr, part))
        table[part.start : part.stop] = [category == "Cn" for category in categories]
    table[SURROGATES] = False
    table[PRIVATE] = False
    return table


@cache
def changed_by_nfc() -> NDArray[np.bool_]:
    """For every code point, whether NFC may change or join it."""
    table = np.zeros(NUM_CODE_POINTS, np.bool_)
    for c in map(chr, chain(*LETTERS_FOR_NFC)):
        parts = unicodedata.decomposition(c).split()
        if parts and parts[0][0] != "<":
            table[ord(c)] |= not unicodedata.is_normalized("NFC", c)
            table[[int(part, 16) for part in parts[1:]]] = True
        table[ord(c)] |= unicodedata.combining(c) > 0
    table[0x1161:0x1176] = table[0x11A8:0x11C3] = True  # Hangul letters join by rule
    return table


class Suspects:
    """Finds the suspect texts of a batch, given the ids that a byte-level vocabulary made of it."""

    def __init__(self, tokens: Mapping[int, bytes], *, nfc: bool) -> None:
        self._nfc = nfc
        risky = unassigned() | changed_by_nfc() if nfc else unassigned()
        self._flagged = flag_tokens(tokens, risky)

    def find(
        self, texts: Sequence[str], ids: NDArray[np.uint32], bounds: NDArray[np.int64]
    ) -> list[int]:
        """Numbers of the suspect texts, ascending."""
        found: list[NDArray[np.int64]] = [
            start + np.flatnonzero(self._flagged.take(ids[start : start + IDS].astype(np.intp)))
            for start in range(0, len(ids), IDS)
        ]
        places = np.concatenate([np.zeros(0, np.int64), *found])
        if not len(places):
            return []
        # Not np.unique, which imports a part of numpy that nothing here needs.
        rows = dict.fromkeys((np.searchsorted(bounds, places, side="right") - 1).tolist())
        return [row for row in rows if self.is_suspect(texts[row])]

    def is_suspect(self, text: str) -> bool:
        """Whether a text is suspect, by its characters."""
        if text.isascii():
            return False
        return any(self._is_doubtful(piece) for piece in _pieces(text) if not piece.isascii())

    def _is_doubtful(self, piece: str) -> bool:
        if self._nfc and not unicodedata.is_normalized("NFC", piece):
            return True
        points = np.frombuffer(piece.encode("utf-32-le"), np.uint32)
        return bool(unassigned()[points].any())


def _pieces(text: str) -> Iterator[str]:
    """The text in pieces that NFC treats independently. Python's NFC copies its input, at four
    bytes a character, so pieces save memory."""
    start = 0
    while start < len(text):
        found = ASCII.search(text, start + CHUNK)
        end = found.start() if found else len(text)
        yield text[start:end]
        start = end


def flag_tokens(tokens: Mapping[int, bytes], risky: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """For every id, whether its bytes may begin one of the risky characters."""
    pairs = _leading_pairs(risky)
    leads = np.asarray(pairs.any(axis=1))
    ids = np.fromiter(tokens, np.int64, len(tokens))
    flagged = np.zeros(int(ids.max(initial=-1)) + 1, np.bool_)
    joined = np.frombuffer(b"".join(tokens.values()), np.uint8)
    ends = np.cumsum(np.fromiter(map(len, tokens.values()), np.int64, len(tokens)))
    if not len(joined):
        return flagged
    within = np.zeros(len(joined), np.bool_)
    within[:-1] = pairs[joined[:-1], joined[1:]]
    lasts = ends[ends > 0] - 1
    within[lasts] = leads[joined[lasts]]  # not a pair of bytes of two tokens
    owners = np.searchsorted(ends, np.flatnonzero(within), side="right")
    flagged[ids[owners]] = True
    return flagged


def _leading_pairs(risky: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """(first byte, second byte) of the UTF-8 of every risky code point; none of them is ASCII."""
    # In characters of three bytes or more, 64 neighbours share the first two.
    blocks = np.flatnonzero(risky.reshape(-1, 64).any(axis=1))
    points = np.concatenate([np.flatnonzero(risky[:0x800]), 64 * blocks[blocks >= 0x800 // 64]])
    encoded = points.astype("<u4").tobytes().decode("utf-32-le").encode()
    data = np.frombuffer(encoded, np.uint8)
    starts = np.flatnonzero((data & 0xC0) != 0x80)
    pairs = np.zeros((256, 256), np.bool_)
    pairs[data[starts], data[starts + 1]] = True
    return pairs
