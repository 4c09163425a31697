"""Gopher's rules for quality and repetition (Rae et al. 2021, arXiv:2112.11446, section A.1.1).

A word is what whitespace separates. The eight stop words are of the paper's text."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import numpy.typing as npt

from trainyard.collection.rules.page import Drop, Page, Verdict

STOP_WORDS = frozenset(("the", "be", "to", "of", "and", "that", "have", "with"))
ELLIPSES = ("...", "\u2026")
BULLETS = ("\u2022", "-", "*", "\u2023", "\u25e6")
LETTER = re.compile(r"[^\W\d_]")
PARAGRAPHS = re.compile(r"\n{2,}")

TOP_NGRAMS = ((2, 0.20), (3, 0.18), (4, 0.16))
"""Table A1: n, and the share of characters that the most frequent n-gram may have."""
REPEATED_NGRAMS = ((5, 0.15), (6, 0.14), (7, 0.13), (8, 0.12), (9, 0.11), (10, 0.10))
"""Table A1: n, and the share of characters that repeated n-grams may cover."""

MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)

Array = npt.NDArray[Any]


def gopher_quality(
    page: Page,
    min_words: int = 50,
    max_words: int = 100_000,
    min_mean_length: float = 3.0,
    max_mean_length: float = 10.0,
    max_symbols: float = 0.1,
    max_bullets: float = 0.9,
    max_ellipses: float = 0.3,
    min_alphabetic: float = 0.8,
    min_stop_words: int = 2,
) -> Verdict:
    """Drops by number and mean length of words, `#` and ellipses a word, lines that begin with a
    bullet or end with an ellipsis, words without a letter, and English stop words."""
    words, lines = page.words, page.lines
    count = len(words)
    if not min_words <= count <= max_words or not count:
        return Drop(f"{count} words")
    mean = sum(map(len, words)) / count
    if not min_mean_length <= mean <= max_mean_length:
        return Drop(f"words of {mean:.1f} characters")
    for name, symbols in (("#", ("#",)), ("ellipses", ELLIPSES)):
        ratio = sum(map(page.text.count, symbols)) / count
        if ratio > max_symbols:
            return Drop(f"{ratio:.2f} {name} a word")
    bullets = sum(line.lstrip().startswith(BULLETS) for line in lines) / len(lines)
    if bullets > max_bullets:
        return Drop(f"{bullets:.0%} of lines begin with a bullet")
    ellipses = sum(line.rstrip().endswith(ELLIPSES) for line in lines) / len(lines)
    if ellipses > max_ellipses:
        return Drop(f"{ellipses:.0%} of lines end with an ellipsis")
    alphabetic = sum(LETTER.search(word) is not None for word in words) / count
    if alphabetic < min_alphabetic:
        return Drop(f"{alphabetic:.0%} of words have a letter")
    stop_words = len(STOP_WORDS.intersection(page.text.lower().split()))
    return Drop(f"{stop_words} stop words") if stop_words < min_stop_words else None


def gopher_repetition(
    page: Page, max_lines: float = 0.30, max_chars: float = 0.20, scale: float = 1.0
) -> Verdict:
    """Drops by the share of lines and paragraphs that repeat an earlier one, of their characters,
    of the characters of the most frequent 2- to 4-gram, and of those in repeated 5- to 10-grams.
    `scale` multiplies the limits of table A1 for n-grams."""
    length = max(len(page.text), 1)
    for name, parts in (
        ("paragraphs", PARAGRAPHS.split(page.text.strip())),
        ("lines", page.lines),
    ):
        repeated = repeats(parts)
        if len(repeated) > max_lines * len(parts):
            return Drop(f"{len(repeated) / len(parts):.0%} of {name} are repeated")
        share = sum(map(len, repeated)) / length
        if share > max_chars:
            return Drop(f"{share:.0%} of characters are in repeated {name}")
    return _ngrams(page, length, scale)


def repeats(parts: list[str]) -> list[str]:
    """The parts that repeat an earlier one."""
    if len(set(parts)) == len(parts):
        return []
    seen: set[str] = set()
    return [part for part in parts if part in seen or seen.add(part)]  # type: ignore[func-returns-value]


def _ngrams(page: Page, length: int, scale: float) -> Verdict:
    numbers: dict[str, int] = {}
    words = page.words
    ids = np.array([numbers.setdefault(word, len(numbers)) for word in words], np.uint64)
    if len(numbers) == len(words):  # no word twice
        return None
    # ends[i]: characters of the first i words, each with a blank after it
    ends = np.concatenate(([0], np.cumsum(np.fromiter(map(len, words), np.int64, len(words)) + 1)))
    for n, limit in TOP_NGRAMS:
        share = _top_ngram(hashes(ids, n), ends, n) / length
        if share > scale * limit:
            return Drop(f"one {n}-gram has {share:.0%} of the characters")
    for n, limit in REPEATED_NGRAMS:
        covered = _covered(hashes(ids, n), n, len(words))
        if not covered.any():  # nor is there a longer one
            return None
        share = _num_chars(covered, ends) / length
        if share > scale * limit:
            return Drop(f"repeated {n}-grams have {share:.0%} of the characters")
    return None


def hashes(ids: Array, n: int) -> Array:
    """(len(ids) - n + 1,) a hash of each n-gram of words, u64."""
    count = max(len(ids) - n + 1, 0)
    found = np.zeros(count, np.uint64)
    for i in range(n):
        found = found * MULTIPLIER + ids[i : i + count] + np.uint64(1)
        found ^= found >> np.uint64(29)
    return found


def _top_ngram(found: Array, ends: Array, n: int) -> int:
    """Characters of all occurrences of the most frequent n-gram; 0 if none occurs twice."""
    if not len(found):
        return 0
    _, first, counts = np.unique(found, return_index=True, return_counts=True)
    most = counts.max()
    if most < 2:
        return 0
    sizes = ends[first + n] - ends[first] - 1
    return int(most * sizes[counts == most].max())


def _covered(found: Array, n: int, num_words: int) -> Array:
    """(num_words,) whether a word is in an n-gram that repeats an earlier one."""
    again = np.ones(len(found), np.bool_)
    again[np.unique(found, return_index=True)[1]] = False
    starts = np.zeros(num_words + 1, np.int64)
    starts[: len(found)] += again
    starts[n : n + len(found)] -= again
    return np.cumsum(starts[:num_words]) > 0


def _num_chars(covered: Array, ends: Array) -> int:
    """Characters of the covered words, with the blanks between neighbours."""
    sizes = np.diff(ends)
    runs = np.count_nonzero(covered[1:] < covered[:-1]) + int(covered[-1])
    return int(sizes[covered].sum() - runs)
