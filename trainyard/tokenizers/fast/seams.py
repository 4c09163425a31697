r"""Finds seams, where a long text can be cut without changing its ids, and encodes it in parts.

A library needs 20 to 60 bytes for each byte of a text that it encodes at once, so long texts are
encoded in parts. Three kinds of tokenizers have seams; a text for any other is never cut:

Byte-level BPE with the patterns of GPT-2, cl100k, o200k and their descendants, without a normalizer
or with NFC: between a letter and a character that is no letter, number, mark or apostrophe. No
alternative of these patterns continues from a letter to such a character. They never look back, and
ahead only at whitespace of which they have matched a part. NFC never joins such a character to what
is left of it. Only characters that are letters in every version of Unicode count. A text for a
tokenizer that adds a space before every text is cut before a space.

BERT: after whitespace, an ideograph (each is a separate word) or a punctuation mark.

SentencePiece BPE without pieces of several words: before a single space between words; and between
digits, if each is a piece of its own and part of no other.

A text is searched for added tokens before it is split into words. So there is no seam at a
character that could be inside an added token, and none for tokens that strip the spaces next to
them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from string import punctuation
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Library

Seam = re.Pattern[str]
"""Matches the empty string where a text may be cut."""

PART_LETTERS = 1 << 18
"""Characters of a part: a quarter of a megabyte of English, at most a megabyte of any text."""

SPACE_SEAM = re.compile(r"(?<=[A-Za-z])(?= [A-Za-z])")
"""Before a single space between words: the seam of SentencePiece."""

SPACE_OR_DIGIT_SEAM = re.compile(f"{SPACE_SEAM.pattern}|(?<=[0-9])(?=[0-9])")
"""The same, for models whose digits stand alone."""

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
"""Without the apostrophe, which begins contractions, and "_", which some patterns treat as a
letter."""

LETTER_RUNS = {
    r" ?\p{L}+",
    r"[^\r\n\p{L}\p{N}]?\p{L}+",
    r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+",
    r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
}
"""Alternatives of known patterns; each alone matches every letter."""

UPPER_LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
UPPER_ONLY = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
CASED_RUNS = [
    {rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER_LOWER}{end}", rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER_ONLY}{end}"}
    for end in ("", CONTRACTIONS + "?")
]
"""Pairs of alternatives that together match every letter."""

OTHERS = {
    *("'s", "'t", "'re", "'ve", "'m", "'ll", "'d", "'(?:[sdmt]|ll|ve|re)"),
    *(CONTRACTIONS, "'(?i:[sdmt]|ll|ve|re)"),
    *(r" ?\p{N}+", r"\p{N}+", r"\p{N}", r"\p{N}{1,3}", r"\p{N}{1,2}"),
    *(r" ?[^\s\p{L}\p{N}]+", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{N}]+[\r\n/]*"),
    *(r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*", r" ?[\p{P}\p{S}]+[\r\n]*"),
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+""",
    *(r"\s*[\r\n]", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+", r"\s+$"),
}
"""Other alternatives; none continues from a letter to anything but a letter."""

HARMLESS = {r"\p{N}", r"\p{N}{1,3}", r"\d", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"}
"""Patterns of a first split; none of their matches contains a seam."""


def parts(text: str, seam: Seam, letters: int | None = None) -> Iterator[str]:
    """The text in order, cut at the first seam after `letters` characters (`PART_LETTERS`)."""
    letters = PART_LETTERS if letters is None else letters
    assert letters > 0, "a part without a letter would be cut off without end"
    start = 0
    while start < len(text):
        found = seam.search(text, start + letters)
        end = found.start() if found else len(text)
        yield text[start:end]
        start = end


def is_long(text: str) -> bool:
    """Whether a text is encoded in parts, if it has seams."""
    return len(text) > PART_LETTERS


def encode_in_parts(
    text: str,
    seam: Seam | None,
    encode: Callable[[str], Sequence[int] | NDArray[np.uint32]],
    letters: int | None = None,
) -> NDArray[np.uint32]:
    """The ids of a text, encoded in parts to save memory.

    A text without a seam is one part."""
    cut = parts(text, seam, letters) if seam else [text]
    rows = [np.asarray(encode(part), np.uint32) for part in cut]
    return np.concatenate([np.zeros(0, np.uint32), *rows])


def find_seam(library: Library) -> Seam | None:
    """The seam of a `tokenizers` tokenizer; None if it is not known."""
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
    """The steps of a normalizer or pre-tokenizer, in order."""
    if component is None:
        return
    try:
        document = json.loads(component.__getstate__())
    except Exception:  # one written in Python cannot be serialized: a step of unknown type
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
    """Whether a pattern has only known alternatives, which together match every letter."""
    pattern = pattern.replace("\r", r"\r").replace("\n", r"\n")
    runs = {_relaxed(a) for a in _alternatives(pattern) if a not in OTHERS} - OTHERS
    return bool(runs) and (runs in CASED_RUNS or runs <= LETTER_RUNS)


def _relaxed(alternative: str) -> str:
    """Without possessive quantifiers, which do not change where a run of letters ends."""
    return re.sub(r"([+?*]|\{[\d,]+\})\+", r"\1", alternative)


def _alternatives(pattern: str) -> Iterator[str]:
    """The alternatives of a pattern, split at its outermost "|"."""
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
