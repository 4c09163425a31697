"""Turns tokenised corpora back into plain text.

WikiText has spaces around punctuation and marks such as @-@. A model trained on plain text should
be evaluated on plain text. The rules and their order are those that published WikiText-103
perplexities of GPT-2 and Megatron-LM were measured with. Pure functions of a string."""

from __future__ import annotations

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
_ENCLOSED = (("(", ")"), ("[", "]"), ("{", "}"), ('"', '"'), ("'", "'"))
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
    for before, after in _ENCLOSED:
        text = _tighten(text, before, after)
    for tokenised, plain in _REST:
        text = text.replace(tokenised, plain)
    return text


def _tighten(text: str, before: str, after: str) -> str:
    """The text without white space at the inner ends of each pair of brackets or quotes.

    The protocol has a regular expression for it, which takes cubic time."""
    parts, at = [], 0
    while (start := text.find(before, at)) >= 0 and (end := text.find(after, start + 1)) >= 0:
        parts += [text[at:start], before, text[start + 1 : end].strip(), after]
        at = end + 1
    return "".join(parts) + text[at:]


PTB = (
    (" '", "'"),
    (" \n", "\n"),
    ("\n ", "\n"),
    (" n't", "n't"),
    (" N ", "1 "),
    ("$ 1", "$1"),
    ("# 1", "#1"),
)


def detokenize_ptb(text: str) -> str:
    """Plain text of a Penn Treebank file, by Megatron-LM's rules."""
    for tokenised, plain in PTB:
        text = text.replace(tokenised, plain)
    return text


def unchanged(text: str) -> str:
    """Text that was never tokenised."""
    return text


DETOKENIZERS: dict[str, Detokenizer] = {
    "wikitext": detokenize_wikitext,
    "ptb": detokenize_ptb,
    "none": unchanged,
}
