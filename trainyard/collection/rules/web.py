"""The rules of C4 and FineWeb for web pages.

C4: Raffel et al. 2020, JMLR 21(140), section 2.2, in the order of its code, c4_utils.py of
TensorFlow Datasets. FineWeb: Penedo et al. 2024, arXiv:2406.17557, section 3.6, as in datatrove.
The phrases and marks are of these two programs, both under the Apache License 2.0."""

from __future__ import annotations

import re

from trainyard.collection.rules.gopher import repeats
from trainyard.collection.rules.page import Drop, Edit, Page, Verdict

CITATION = re.compile(r"\[\d*\]|\[edit\]|\[citation needed\]")
END_MARKS = (".", "?", "!", '"')
POLICIES = (
    *("terms of use", "privacy policy", "cookie policy", "uses cookies"),
    *("use of cookies", "use cookies"),
)
SENTENCE_END = re.compile(r"(?<![.!?])[.!?]++[\"'\u201d\u2019)\]]*(?=\s|$)")

TERMINAL = (
    *".!?\"'\u2026\u201d\u2019;:)]}",
    *"\u3002\uff01\uff1f\u061f\u06d4\u0964\u0965\uff1b\uff1a\u300d\u300f",
)
"""What may end a line for FineWeb: Latin punctuation, and that of other scripts."""


def c4(
    page: Page,
    min_sentences: int = 3,
    min_words: int = 5,
    max_word_length: int = 1000,
    end_marks: bool = True,
) -> Verdict:
    """Keeps lines that end in a mark and have `min_words` words, without "javascript" or phrases of
    cookie and privacy notices; removes citation marks of Wikipedia; drops pages with `{`, "lorem
    ipsum", or fewer than `min_sentences` sentences. `end_marks` false keeps lines without a mark,
    as FineWeb does. Sentences are counted by their marks."""
    kept: list[str] = []
    removed: list[str] = []
    sentences = 0
    for raw in page.text.split("\n"):
        line = CITATION.sub("", raw.strip())
        if _is_unwanted(line, min_words, max_word_length, end_marks):
            removed += [raw] if raw.strip() else []
            continue
        lower = line.lower()
        if "lorem ipsum" in lower:
            return Drop("lorem ipsum")
        if "javascript" in lower:
            removed.append(raw)
            continue
        if "{" in line:
            return Drop("a curly bracket")
        if any(policy in lower for policy in POLICIES):
            removed.append(raw)
            continue
        sentences += max(1, len(SENTENCE_END.findall(line)))
        kept.append(line)
    if sentences < min_sentences:
        return Drop(f"{sentences} sentences")
    text = "\n".join(kept).strip()
    return None if text == page.text else Edit(text, tuple(removed))


def _is_unwanted(line: str, min_words: int, max_word_length: int, end_marks: bool) -> bool:
    if end_marks and (not line.endswith(END_MARKS) or line.endswith("...")):
        return True
    words = line.split()
    return len(words) < max(min_words, 1) or max(map(len, words)) > max_word_length


def citations(page: Page) -> Verdict:
    """Removes the citation marks of Wikipedia, such as [1], [edit] and [citation needed]."""
    text = CITATION.sub("", page.text)
    return None if text == page.text else Edit(text)


def fineweb(
    page: Page,
    min_terminal: float = 0.12,
    max_short: float = 0.67,
    short: int = 30,
    max_repeated: float = 0.01,
    max_breaks: float = 0.3,
) -> Verdict:
    """Drops by the share of lines that end in punctuation, of lines of at most `short` characters,
    of characters in repeated lines, and by line feeds a word."""
    lines = page.lines
    if not lines:
        return Drop("no line")
    terminal = sum(line.endswith(TERMINAL) for line in lines) / len(lines)
    if terminal < min_terminal:
        return Drop(f"{terminal:.0%} of lines end in punctuation")
    share = sum(len(line) <= short for line in lines) / len(lines)
    if share > max_short:
        return Drop(f"{share:.0%} of lines have at most {short} characters")
    breaks = page.text.count("\n")
    repeated = sum(map(len, repeats(lines))) / (len(page.text) - breaks)
    if repeated > max_repeated:
        return Drop(f"{repeated:.0%} of characters are in repeated lines")
    per_word = breaks / len(page.words)
    return Drop(f"{per_word:.2f} line feeds a word") if per_word > max_breaks else None
