"""Upstream's rule for a text with an n-gram of an evaluation set: keep what is far from it.

From Megatron-LM's filter_ngrams.py: at a hit, go some characters back and then to the end of the
sentence before, and as far ahead; keep both sides that are long enough, and look at the right one
again. Pure functions."""

from __future__ import annotations

from trainyard.collection.contamination.ngrams import Hit, Matcher

SENTENCE_ENDS = ".!?"


def split_at(text: str, hit: Hit, each_side: int, begin: int = 0) -> tuple[int, int]:
    """(end of the part before a hit, beginning of the part after it), in characters. What is before
    `begin` takes no part."""
    end = hit.start - each_side
    while end > begin and text[end] not in SENTENCE_ENDS:
        end -= 1
    start = hit.start + len(hit.ngram) + each_side
    while start < len(text) and text[start] not in SENTENCE_ENDS:
        start += 1
    return end + 1 if end > begin else begin, min(start + 1, len(text))


def clean_pieces(
    text: str, matcher: Matcher, each_side: int, shortest: int
) -> tuple[list[str], list[str]]:
    """(pieces, n-grams found): the parts of a text without an n-gram, each of more than `shortest`
    characters unless it is the whole text."""
    pieces: list[str] = []
    found: list[str] = []
    begin = 0
    for hit in matcher.hits(text):
        if hit.start < begin:
            continue
        found.append(hit.ngram)
        end, after = split_at(text, hit, each_side, begin)
        if end - begin > shortest:  # it ends with a sentence, before the first n-gram
            pieces.append(text[begin:end])
        begin = after
        if len(text) - begin <= shortest:
            return pieces, found
    return [*pieces, text[begin:]], found
