"""Turns tokenised corpora back into plain text.

WikiText has spaces around punctuation and marks such as @-@. A model trained on plain text should
be evaluated on plain text. The rules and their order are those that published WikiText-103
perplexities of GPT-2 and Megatron-LM were measured with. Pure functions of a string."""

from __future__ import annotations

import re
from collections.abc import Callable

Detokenizer = Callable[[str], str]

_DEGREE = chr(176)

# Each rule sees the output of the ones before; the order is part of the protocol.
_JOINED = (
    ("s '", "s'"),
    (" @-@ ", "-"),
    (" @,@ ", ","),
    (" @.@ ", "."),
    (" : ", ": "),
    (" ; ", "; "),
    (" . ", ". "),
    (" ! ", "! "),
    (" ? ", "? "),
    (" , ", ", "),
)
_ENCLOSED = tuple(
    (re.compile(rf"{before}\s*([^{after}]*?)\s*{after}"), template)
    for before, after, template in (
        (r"\(", r"\)", r"(\1)"),
        (r"\[", r"\]", r"[\1]"),
        (r"\{", r"\}", r"{\1}"),
        ('"', '"', r'"\1"'),
        ("'", "'", r"'\1'"),
    )
)
_REST = (
    ("= = = =", "===="),
    ("= = =", "==="),
    ("= =", "=="),
    (f" {_DEGREE} ", _DEGREE),
    (" \n", "\n"),
    ("\n ", "\n"),
    (" N ", " 1 "),
    (" 's", "'s"),
)


def detokenize_wikitext(text: str) -> str:
    """Plain text of a WikiText file."""
    for tokenised, plain in _JOINED:
        text = text.replace(tokenised, plain)
    for pattern, template in _ENCLOSED:
        text = pattern.sub(template, text)
    for tokenised, plain in _REST:
        text = text.replace(tokenised, plain)
    return text


def unchanged(text: str) -> str:
    """Text that was never tokenised."""
    return text


DETOKENIZERS: dict[str, Detokenizer] = {"wikitext": detokenize_wikitext, "none": unchanged}
