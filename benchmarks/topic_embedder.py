"""An embedder that costs little, for runs at scale: latent semantic analysis.

A text is the sum of the vectors of its words, scaled to length 1; the vectors of words are the
left singular vectors of a matrix of words and texts, weighted by rarity (Deerwester et al., 1990).
`benchmarks.retro_scale` fits it to a corpus, and offers `embed` to `stages.retro_embed --embedder`
by an entry point, as a user's package would."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Vectors = NDArray[np.float32]

DIMENSIONS = 64
MOST_WORDS = 8192
EXTRA = 16
"""Columns of the random projection beyond the dimensions (Halko et al., arXiv:0909.4061)."""

FILE = "TOPIC_EMBEDDER"
"""Variable that names the fitted table."""

WORD = re.compile(r"\w+")


def fit(texts: Sequence[str], path: Path) -> None:
    """Write the table of words and their vectors, from some thousand texts."""
    counts = Counter(word for text in texts for word in set(_words(text)))
    words = [word for word, _ in counts.most_common(MOST_WORDS)]
    places = {word: place for place, word in enumerate(words)}
    rarity = np.log(len(texts) / np.array([counts[word] for word in words], np.float32))
    table = np.zeros((len(words), len(texts)), np.float32)
    for number, text in enumerate(texts):
        found = [places[word] for word in _words(text) if word in places]
        np.add.at(table[:, number], found, 1.0)
    table *= rarity[:, None]
    table /= np.maximum(np.linalg.norm(table, axis=0), 1e-9)
    random = np.random.default_rng(1).standard_normal((len(texts), DIMENSIONS + EXTRA), np.float32)
    basis = np.linalg.qr(table @ (table.T @ (table @ random)))[0]
    left = np.linalg.svd(basis.T @ table, full_matrices=False)[0]
    vectors = rarity[:, None] * (basis @ left)[:, :DIMENSIONS]
    np.savez(path, words=np.array(words), vectors=vectors.astype(np.float32))


def embed(texts: list[str]) -> Vectors:
    """(texts, 64) vectors of length 1; a text without a known word points along the first axis."""
    places, table = _table()
    unknown = len(table) - 1
    rows = [[places.get(word, unknown) for word in _words(text)] or [unknown] for text in texts]
    ends = np.cumsum([len(row) for row in rows])
    flat = np.fromiter((place for row in rows for place in row), np.int64, ends[-1])
    sums = np.add.reduceat(table[flat], np.append(0, ends[:-1]))
    sums[~sums.any(axis=1), 0] = 1.0
    scaled: Vectors = sums / np.linalg.norm(sums, axis=1, keepdims=True)
    return scaled


def _words(text: str) -> list[str]:
    return WORD.findall(text.lower())


@cache
def _table() -> tuple[dict[str, int], Vectors]:
    """Rows of words, and the vectors, a zero one for all other words last."""
    with np.load(os.environ[FILE], allow_pickle=False) as found:
        words, vectors = found["words"].tolist(), found["vectors"]
    nothing = np.zeros((1, vectors.shape[1]), np.float32)
    return {word: place for place, word in enumerate(words)}, np.concatenate((vectors, nothing))
