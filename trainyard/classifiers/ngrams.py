"""A classifier that needs no download: logistic regression over hashed words and pairs of words, as
the baseline of fastText (arXiv:1607.01759) without its embeddings.

It knows the words of its examples and nothing else: neither their order beyond pairs nor what they
mean. The same examples give the same weights, bit for bit on one kind of machine."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

NUM_FEATURES = 2**18
"""Places that words and pairs are hashed to; two may share one."""
EPOCHS = 10
LEARNING_RATE = 0.5
SEED = 1234
MOST_LOGIT = 30.0
"""Beyond it, a probability is 0 or 1 in all digits that matter."""

WORD = re.compile(r"\w+")

Weights = NDArray[np.float64]


def features(text: str) -> NDArray[np.int64]:
    """The places of the words and pairs of words of a text, each once, in order. The last place is
    that of the bias, which every text has."""
    words = WORD.findall(text.lower())
    pairs = [f"{a} {b}" for a, b in pairwise(words)]
    hashed = {zlib.crc32(gram.encode()) % NUM_FEATURES for gram in (*words, *pairs)}
    return np.array([*sorted(hashed), NUM_FEATURES], np.int64)


@dataclass(frozen=True, slots=True)
class NgramClassifier:
    """Probabilities by the weights of the grams of a text."""

    weights: Weights
    """(NUM_FEATURES + 1,) the last one is the bias."""

    def score(self, texts: Sequence[str]) -> NDArray[np.float64]:
        """(texts,) the probability of label 1. Grams that no example has say nothing, and do not
        count as a part of the length."""
        rows = (features(text) for text in texts)
        known = (row[self.weights[row] != 0] for row in rows)
        return np.array([_probability(self.weights, row) for row in known])


def train(
    texts: Sequence[str], targets: Sequence[float], report: Callable[[int], object] | None = None
) -> NgramClassifier:
    """The classifier that fits the examples: AdaGrad (Duchi et al. 2011) on the cross-entropy.

    targets: of each text, the label 0 or 1, or a probability between them. report: is told after
    each of the EPOCHS that one is over."""
    rows = [features(text) for text in texts]
    weights = np.zeros(NUM_FEATURES + 1)
    squares = np.full(NUM_FEATURES + 1, 1e-8)
    order = np.random.default_rng(SEED)
    for _ in range(EPOCHS):
        for example in order.permutation(len(rows)):
            row = rows[example]
            gradient = _probability(weights, row) - targets[example]
            scaled = gradient / np.sqrt(len(row))
            squares[row] += scaled * scaled
            weights[row] -= LEARNING_RATE * scaled / np.sqrt(squares[row])
        if report is not None:
            report(1)
    return NgramClassifier(weights)


def _probability(weights: Weights, row: NDArray[np.int64]) -> float:
    """Of label 1. The length of a text does not change the scale of its logit."""
    logit = float(weights[row].sum() / np.sqrt(max(len(row), 1)))
    return float(1 / (1 + np.exp(-np.clip(logit, -MOST_LOGIT, MOST_LOGIT))))


# --- how good it is -------------------------------------------------------------------------------


def area_under_roc(scores: NDArray[np.float64], is_positive: NDArray[np.bool_]) -> float | None:
    """Probability that a positive text scores higher than another one, ties counted half; None
    without texts of both kinds."""
    positive, other = scores[is_positive], np.sort(scores[~is_positive])
    if not len(positive) or not len(other):
        return None
    below = np.searchsorted(other, positive, "left")
    up_to = np.searchsorted(other, positive, "right")
    return float((below + up_to).mean() / (2 * len(other)))
