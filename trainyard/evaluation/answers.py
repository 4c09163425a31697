"""Exact match and F1 of answers, by the definitions of Megatron-LM's tools/retro/text_generation.

Exact match compares with every answer, F1 with the first one. The two normalise differently:
punctuation is removed for one, and becomes a space for the other (ParlAI). Standard library
only."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

ARTICLES = re.compile(r"\b(a|an|the)\b")
PUNCTUATION = re.compile(r"""[!"#$%&()*+,\-./:;<=>?@\[\]\\^`{|}~_']""")
LABELS = ("Answer:", "Answer: ", "????  ", "A: ", "A:")
"""What a prediction loses before exact match, in this order."""
END = "<|endoftext|>"
NO_ANSWER = "no_passages_used"
"""An answer that counts as an empty one."""


class TokenScores(NamedTuple):
    """Precision, recall and F1 of the words of an answer."""

    precision: float
    recall: float
    f1: float


def exact_match(prediction: str, answers: Sequence[str]) -> bool:
    """Whether a prediction is one of the answers, but for case, punctuation, articles, spaces."""
    for label in LABELS:
        prediction = prediction.replace(label, "")
    found = _without_punctuation(prediction.strip().replace(END, ""))
    return any(found == _without_punctuation(answer) for answer in answers)


def token_scores(prediction: str, answer: str) -> TokenScores | None:
    """Overlap of the words of a prediction with those of an answer; None for an empty answer, which
    takes no part in the mean."""
    gold = answer.strip()
    if gold in ("", NO_ANSWER):
        return None
    guess = prediction.strip().replace(END, "")
    words, wanted = _words(guess), _words(gold)
    num_same = sum((Counter(wanted) & Counter(words)).values())
    if not num_same:
        return TokenScores(0.0, 0.0, 0.0)
    precision, recall = num_same / len(words), num_same / len(wanted)
    return TokenScores(precision, recall, 2 * precision * recall / (precision + recall))


def _without_punctuation(text: str) -> str:
    kept = "".join(char for char in text.lower() if char not in string.punctuation)
    return " ".join(ARTICLES.sub(" ", kept).split())


def _words(text: str) -> list[str]:
    return ARTICLES.sub(" ", PUNCTUATION.sub(" ", text.lower())).split()
