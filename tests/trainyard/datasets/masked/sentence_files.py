"""A token file of sentences, for BERT and T5."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.trainyard.corpus.token_files import write_tokens
from trainyard.corpus.indexed import IndexedDataset

VOCABULARY = 1000
SPECIAL = 10
"""Ids below it stand in no text."""


def write_sentences(
    prefix: Path, documents: int, seed: int = 0, dtype: str = "u2"
) -> IndexedDataset:
    """Documents of 0 to 11 sentences of 1 to 39 tokens."""
    random = np.random.RandomState(seed)
    docs = []
    for _ in range(documents):
        lengths = random.randint(1, 40, random.randint(0, 12))
        docs.append([random.randint(SPECIAL, VOCABULARY, n) for n in lengths])
    return IndexedDataset(write_tokens(prefix, docs, dtype))
