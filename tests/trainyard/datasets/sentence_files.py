"""A token file of sentences, for BERT and T5."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from trainyard.corpus.indexed import IndexedDataset, IndexedWriter

VOCABULARY = 1000
SPECIAL = 10
"""Ids below it stand in no text."""


def write_sentences(
    prefix: Path, documents: int, seed: int = 0, dtype: str = "u2"
) -> IndexedDataset:
    """Documents of 0 to 11 sentences of 1 to 39 tokens."""
    random = np.random.RandomState(seed)
    with open(f"{prefix}.bin", "wb") as bin_file, open(f"{prefix}.idx", "wb") as idx_file:
        writer = IndexedWriter(bin_file, np.dtype(dtype))
        for _ in range(documents):
            lengths = random.randint(1, 40, random.randint(0, 12))
            writer.add_document([random.randint(SPECIAL, VOCABULARY, n) for n in lengths])
        writer.write_index(idx_file)
    return IndexedDataset(str(prefix))
