r"""Words of any script: runs of letters, digits and marks.

Python's \w leaves out combining marks, so it would cut Hindi, Tamil or Thai at each vowel sign that
is one, and joiners, which Indic scripts and Persian write inside words."""

from __future__ import annotations

import re
import sys
import unicodedata
from functools import cache

ASCII_WORD = re.compile(r"\w+", re.ASCII)

JOINERS = "\u200c\u200d"


@cache
def word_pattern() -> re.Pattern[str]:
    """Matches a word, which begins with a letter, digit or underscore. Marks are looked for only
    where Python's \\w+ ends, and not at a blank or Latin sign: their class is slow."""
    marks = (chr(n) for n in range(0x300, sys.maxunicode + 1))
    inside = "".join(one for one in marks if unicodedata.category(one).startswith("M"))
    return re.compile(rf"\w+(?:(?![\x00-\u02ff])[{inside}{JOINERS}]+\w*)*")


def words_of(text: str) -> list[str]:
    """The words of a text, in order."""
    return (ASCII_WORD if text.isascii() else word_pattern()).findall(text)


def lowered(text: str) -> str:
    """Lower case of the same length: a letter that would become two stays."""
    lower = text.lower()
    if len(lower) == len(text):
        return lower
    # Only the dotted I becomes two; a sigma does not become a final one here.
    parts = text.replace("\u03a3", "\u03c3").split("\u0130")
    return "\u0130".join(map(str.lower, parts))
