r"""Where a long text may be cut so that its parts make the ids of the whole.

Two shapes of tokenizers are known, and a text for any other is never cut:

Byte-level BPE with the patterns of GPT-2, cl100k, o200k and their descendants, without a normalizer
or with NFC: between a letter and a character that is no letter, number, mark or apostrophe. No
alternative of these patterns goes on from a letter to such a character; they look back at nothing
and ahead only at whitespace that they have matched a part of; and NFC joins nothing to such a
character from its left. Only letters count that have been letters in every version of Unicode that
a library may know. Where a space is put before every text, the cut is before a space.

BERT's: behind whitespace, an ideograph (each is a word of its own) or a mark of punctuation.

Added tokens are looked for before words are cut, so characters at which one of them could be cut
through are no places for a seam, and tokens that take the spaces beside them forbid all cutting."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from string import punctuation
from typing import TYPE_CHECKING, Any

from trainyard.tokenizers.fast.rows import Rows, rows_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Library

Seam = re.Pattern[str]
"""Matches the empty string where a text may be cut."""

LETTERS = (
    "A-Za-z"
    "\u03b1-\u03c9\u0410-\u044f"  # Greek, Cyrillic
    "\u05d0-\u05ea\u0621-\u063a\u0641-\u064a"  # Hebrew, Arabic
    "\u0e01-\u0e30"  # Thai
    "\u3041-\u3094\u30a1-\u30fa"  # kana
    "\u4e00-\u9fa5\uac00-\ud7a3"  # ideographs, Hangul
)
IDEOGRAPHS = "\u3400-\u4db5\u4e00-\u9fa5"
SPACES = " \t\n\r"
EAST_ASIAN = "\u3001\u3002\uff01\uff0c\uff1a\uff1b\uff1f"
AFTER_LETTERS = SPACES + '!"#$%&()*+,-./:;<=>?@[\\]^`{|}~' + EAST_ASIAN
"""Without the apostrophe, with which contractions begin, and "_", a letter of a word to some."""

LETTER_RUNS = {
    r" ?\p{L}+",
    r"[^\r\n\p{L}\p{N}]?\p{L}+",
    r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+",
    r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
}
"""Alternatives of known patterns of which one is enough to match every letter."""

UPPER_LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
UPPER_ONLY = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
CASED_RUNS = [
    {rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER_LOWER}{end}", rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER_ONLY}{end}"}
    for end in ("", CONTRACTIONS + "?")
]
"""Those of which it takes both."""

OTHERS = {
    *("'s", "'t", "'re", "'ve", "'m", "'ll", "'d", "'(?:[sdmt]|ll|ve|re)"),
    *(CONTRACTIONS, "'(?i:[sdmt]|ll|ve|re)"),
    *(r" ?\p{N}+", r"\p{N}+", r"\p{N}", r"\p{N}{1,3}", r"\p{N}{1,2}"),
    *(r" ?[^\s\p{L}\p{N}]+", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{N}]+[\r\n/]*"),
    *(r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*", r" ?[\p{P}\p{S}]+[\r\n]*"),
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+""",
    *(r"\s*[\r\n]", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+", r"\s+$"),
}
"""The others: none goes on from a letter to anything but a letter."""

DIGITS = {r"\p{N}", r"\p{N}{1,3}", r"\d"}
HARMLESS = DIGITS | {"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"}
"""Patterns of a first cut, of which no match holds a seam."""

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""The pattern that the library's ByteLevel has built in."""


def find_seam(library: Library) -> Seam | None:
    """Where texts for a `tokenizers` tokenizer may be cut; None where it is not known."""
    tokens = list(library.get_added_tokens_decoder().values())
    if any(token.lstrip or token.rstrip or token.single_word for token in tokens):
        return None
    normalizers = list(_steps(library.normalizer, "normalizers"))
    cutters = list(_steps(library.pre_tokenizer, "pretokenizers"))
    contents = [token.content for token in tokens]
    normalized = [token.content for token in tokens if token.normalized]
    if [step.get("type") for step in cutters] == ["BertPreTokenizer"]:
        plain = len(normalizers) == 1 and not normalized
        return word_seam(contents) if plain and _is_bert(normalizers[0]) else None
    if [step.get("type") for step in normalizers] not in ([], ["NFC"]):
        return None
    if normalizers and not all(map(str.isascii, normalized)):
        return None
    if not _is_byte_level(cutters):
        return None
    prefixed = any(step.get("add_prefix_space") for step in cutters)
    return letter_seam(contents, " " if prefixed else AFTER_LETTERS)


def find_rows(library: Library) -> Rows | None:
    """Rows of characters that keep together; None where they are not known."""
    cutters = list(_steps(library.pre_tokenizer, "pretokenizers"))
    kinds = [step.get("type") for step in cutters]
    if find_seam(library) is None or "BertPreTokenizer" in kinds:
        return None
    if any(step.get("add_prefix_space") for step in cutters):
        return None
    patterns = [step["pattern"]["Regex"] for step in cutters if step["type"] == "Split"]
    if any(step.get("use_regex") for step in cutters if step["type"] == "ByteLevel"):
        patterns.append(GPT2)
    harmless = HARMLESS.intersection(patterns)
    rows = rows_of(
        [alternatives_of(pattern) for pattern in patterns if pattern not in HARMLESS],
        digits="Digits" in kinds or any(pattern in DIGITS for pattern in harmless),
        ideographs=not harmless <= DIGITS,
    )
    contents = [token.content for token in library.get_added_tokens_decoder().values()]
    return replace(rows, nfc=library.normalizer is not None).without(contents)


def letter_seam(tokens: Iterable[str], followers: str = AFTER_LETTERS) -> Seam | None:
    """The seam of a byte-level BPE with these added tokens, before one of the `followers`."""
    letter = re.compile(f"(?<=[{LETTERS}])[{re.escape(followers)}]")
    within = {c for token in tokens for c in letter.findall(token)}
    free = "".join(c for c in followers if c not in within)
    return re.compile(f"(?<=[{LETTERS}])(?=[{re.escape(free)}])") if free else None


def word_seam(tokens: Iterable[str]) -> Seam | None:
    """The seam of BERT's word pieces with these added tokens."""
    within = {c for token in tokens for c in token[:-1]}
    free = re.escape("".join(c for c in SPACES + punctuation + EAST_ASIAN if c not in within))
    if not re.search(f"[{IDEOGRAPHS}]", "".join(within)):
        free += IDEOGRAPHS
    return re.compile(f"(?<=[{free}])") if free else None


def _steps(component: Any, key: str) -> Iterator[dict[str, Any]]:
    """What a normalizer or pre-tokenizer does, one after the other."""
    if component is None:
        return
    try:
        document = json.loads(component.__getstate__())
    except Exception:  # one written in Python cannot be written out: a step of no known type
        document = {}
    yield from _flat(document, key)


def _flat(document: dict[str, Any], key: str) -> Iterator[dict[str, Any]]:
    if document.get("type") != "Sequence":
        yield document
        return
    for step in document[key]:
        yield from _flat(step, key)


def _is_bert(step: dict[str, Any]) -> bool:
    return step.get("type") == "BertNormalizer" and bool(step.get("handle_chinese_chars"))


def _is_byte_level(cutters: list[dict[str, Any]]) -> bool:
    """Whether words end with letters, and every step is a known one."""
    ends = False
    for step in cutters:
        if step.get("type") == "ByteLevel":
            ends |= bool(step.get("use_regex"))
        elif step.get("type") == "Split":
            pattern = step["pattern"].get("Regex", "")
            if step["behavior"] != "Isolated" or step["invert"]:
                return False
            if is_known(pattern):
                ends = True
            elif pattern not in HARMLESS:
                return False
        elif step.get("type") != "Digits":
            return False
    return ends


def is_known(pattern: str) -> bool:
    """Whether a pattern is made of known alternatives, and they leave no letter out."""
    runs = alternatives_of(pattern) - OTHERS
    return bool(runs) and (runs in CASED_RUNS or runs <= LETTER_RUNS)


def alternatives_of(pattern: str) -> frozenset[str]:
    """The alternatives of a pattern as they are written here."""
    pattern = pattern.replace("\r", r"\r").replace("\n", r"\n")
    return frozenset(a if a in OTHERS else _relaxed(a) for a in _alternatives(pattern))


def _relaxed(alternative: str) -> str:
    """Without the signs that forbid going back, which move no end of a run of letters."""
    return re.sub(r"([+?*]|\{[\d,]+\})\+", r"\1", alternative)


def _alternatives(pattern: str) -> Iterator[str]:
    """What the outermost "|" of a pattern keep apart."""
    depth, start, in_class, k = 0, 0, False, 0
    while k < len(pattern):
        c = pattern[k]
        if c == "\\":
            k += 1
        elif in_class:
            in_class = c != "]"
        elif c == "[":
            in_class = True
        elif c in "()":
            depth += 1 if c == "(" else -1
        elif c == "|" and depth == 0:
            yield pattern[start:k]
            start = k + 1
        k += 1
    yield pattern[start:]
