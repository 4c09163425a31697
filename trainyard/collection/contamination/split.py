"""Upstream's rule for a text with an n-gram of an evaluation set: keep what is far from it.

From Megatron-LM's filter_ngrams.py: at a hit, go some characters back and then to the end of the
sentence before, and as far ahead; keep both sides that are long enough, and look at the right one
again. Pure functions."""

from __future__ import annotations

from trainyard.collection.contamination.ngrams import Hit, Matcher

SENTENCE_ENDS = ".!?"


def split_at(text: str, hit: Hit, each_side: int) -> tuple[str, str]:
    """What is left of a text before and after a hit."""
    end = hit.start - each_side
    while end > 0 and text[end] not in SENTENCE_ENDS:
        end -= 1
    start = hit.start + len(hit.ngram) + each_side
    while start < len(text) and text[start] not in SENTENCE_ENDS:
        start += 1
    return text[: end + 1] if end > 0 else "", text[start + 1 :]


def clean_pieces(
    text: str, matcher: Matcher, each_side: int, shortest: int
) -> tuple[list[str], list[str]]:
    """(pieces, n-grams found): the parts of a text without an n-gram, each of more than `shortest`
    characters unless it is the whole text."""
    pieces: list[str] = []
    found: list[str] = []
    rest = text
    while True:
        hit = matcher.first(rest)
        if hit is None:
            return [*pieces, rest], found
        found.append(hit.ngram)
        before, rest = split_at(rest, hit, each_side)
        if len(before) > shortest:  # it ends with a sentence, before the first n-gram
            pieces.append(before)
        if len(rest) <= shortest:
            return pieces, found
