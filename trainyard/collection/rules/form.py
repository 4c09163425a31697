"""Rules about the form of a text: mojibake, Unicode, blanks, length."""

from __future__ import annotations

import itertools
import re
import unicodedata
from typing import Literal

import ftfy

from trainyard.collection.rules.page import Drop, Page, Verdict, edited

NEVER_FIXED = re.compile(r"[^\x09\x0a\x20-\x25\x27-\x7e]")
"""What ftfy may change: anything but printable ASCII without `&`, tabs and line feeds."""

LONGEST_SEGMENT = ftfy.TextFixerConfig().max_decode_length

BLANKS_AT_END = re.compile(r"(?<![ \t\r\f\v])[ \t\r\f\v]++$", flags=re.MULTILINE)
"""From the first blank of a run on, once: a text of blanks alone takes linear time."""
BLANKS = re.compile(r"  +|\b\n+ |\b\n+")


RUN_OF_MARKS = re.compile(r"[^\w\x00-\x7f]{64,}")
"""What has every run of combining marks longer than any writing's, and rows of symbols."""


def in_order(text: str) -> str:
    """The text with its long runs of combining marks in canonical order, which normalisation would
    find in the square of their length. The normal forms stay the same (UAX 15, section 1.1)."""
    return text if text.isascii() else RUN_OF_MARKS.sub(_sorted_marks, text)


def _sorted_marks(run: re.Match[str]) -> str:
    parts = []
    for are_marks, group in itertools.groupby(run[0], _is_mark):
        part = "".join(group)
        if are_marks:
            single = "".join(unicodedata.normalize("NFD", mark) for mark in part)
            part = "".join(sorted(single, key=unicodedata.combining))
        parts.append(part)
    return "".join(parts)


def _is_mark(character: str) -> bool:
    return unicodedata.combining(unicodedata.normalize("NFD", character)[0]) != 0


def normalized(form: Literal["NFC", "NFKC"], text: str) -> str:
    """A normal form of a text."""
    return unicodedata.normalize(form, in_order(text))


def fix_text(page: Page) -> Verdict:
    """ftfy.fix_text: mojibake, HTML entities, ligatures, widths, quotes, line breaks, control
    characters, NFC (ftfy 6; the first step of Megatron-LM's cleanup_dataset.py)."""
    return edited(page, fixed(in_order(page.text)))


def fixed(text: str) -> str:
    """What ftfy.fix_text returns, without asking it about lines of plain ASCII.

    With its defaults, ftfy unescapes entities up to the line before the first "<"."""
    if NEVER_FIXED.search(text) is None:
        return text
    lines = text.split("\n")
    if max(map(len, lines)) >= LONGEST_SEGMENT:
        return ftfy.fix_text(text)  # which cuts such a line
    last, has_markup = len(lines) - 1, False
    for i, line in enumerate(lines):
        has_markup = has_markup or "<" in line
        if NEVER_FIXED.search(line) is not None:
            end = "" if i == last else "\n"
            config = ftfy.TextFixerConfig(unescape_html=False if has_markup else "auto")
            lines[i] = ftfy.fix_text_segment(line + end, config).removesuffix(end)
    return "\n".join(lines)


def nfc(page: Page) -> Verdict:
    """Unicode normalisation form C: composed characters."""
    return edited(page, normalized("NFC", page.text))


def nfkc(page: Page) -> Verdict:
    """Unicode normalisation form KC: composed, and compatibility characters replaced."""
    return edited(page, normalized("NFKC", page.text))


def general_cleaning(page: Page) -> Verdict:
    """One blank for runs of blanks and for the line feeds after a word (`general_cleaning` of
    Megatron-LM's cleanup_fix_dataset.py, which never runs it where `ftfy_fix_text` is given)."""
    return edited(page, BLANKS.sub(" ", page.text))


def blank_lines(page: Page, most: int = 1) -> Verdict:
    """No blanks at the ends of lines, at most `most` blank lines between others, none around."""
    text = BLANKS_AT_END.sub("", page.text)
    text = re.sub(rf"\n{{{most + 2},}}", "\n" * (most + 1), text)
    return edited(page, text.strip("\n"))


def min_chars(page: Page, limit: int = 512) -> Verdict:
    """Drops a text of fewer than `limit` characters (`remove_512` of cleanup_fix_dataset.py)."""
    return Drop(f"{len(page.text)} characters") if len(page.text) < limit else None


def max_chars(page: Page, limit: int = 10_000_000) -> Verdict:
    """Drops a text of more than `limit` characters."""
    return Drop(f"{len(page.text)} characters") if len(page.text) > limit else None


def min_words(page: Page, limit: int = 50) -> Verdict:
    """Drops a text of fewer than `limit` words."""
    return Drop(f"{len(page.words)} words") if len(page.words) < limit else None


def min_tokens(page: Page, limit: int = 128, below_chars: int = 1024) -> Verdict:
    """Drops a text of fewer than `limit` tokens; one of `below_chars` characters or more is not
    counted (Megatron-LM's cleanup_dataset.py, with GPT-2's tokenizer). Needs a tokenizer."""
    if len(page.text) >= below_chars or page.num_tokens >= limit:
        return None
    return Drop(f"{page.num_tokens} tokens")


def javascript_notice(page: Page, limit: int = 256) -> Verdict:
    """Drops a text of fewer than `limit` characters that says "javascript"
    (`remove_256_javascript` of cleanup_fix_dataset.py)."""
    found = len(page.text) < limit and "javascript" in page.text.lower()
    return Drop(f"{len(page.text)} characters and javascript") if found else None
