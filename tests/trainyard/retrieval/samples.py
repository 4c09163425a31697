"""Samples of a training over the small corpora, a database of them, and embeddings of both, which
are counts of bytes: chunks of similar letters are neighbours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.trainyard.retrieval.corpora import LENGTH, build, write_corpus
from tests.trainyard.retrieval.embedded import write_blocks
from trainyard.config import from_dict
from trainyard.retrieval.chunk_database import ChunkDatabase
from trainyard.retrieval.pretraining_chunks import NO_TOKEN, PretrainingChunks
from trainyard.retrieval.vectors import Vectors
from trainyard.training.options.samples import RunSamplesConfig
from trainyard.training.run_samples import open_chunks

DIMENSIONS = 16
SEQ_LENGTH = 4 * LENGTH

WORDS = [
    "yard",
    "train",
    "track",
    "night",
    "dawn",
    "word",
    "line",
    "switch",
    "brake",
    "wagon",
    "coal",
]


def sentences(count: int, seed: int) -> list[str]:
    """Texts of a few words each."""
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(WORDS, rng.integers(2, 14))) for _ in range(count)]


def embed(tokens: NDArray[np.int64]) -> Vectors:
    """(n, DIMENSIONS) for rows of tokens."""
    basis = np.random.default_rng(5).standard_normal((257, DIMENSIONS))
    basis[0] = 0  # the end of document, and padding
    found: Vectors = basis[np.where(tokens == NO_TOKEN, 0, tokens)].sum(axis=1).astype(np.float32)
    return found


@dataclass(frozen=True)
class Yard:
    """A folder with corpora, db, embeddings of the database, and of the samples' chunks."""

    folder: Path
    prefixes: Sequence[str]
    options: dict[str, Any]
    """That decide the samples."""

    @property
    def samples(self) -> RunSamplesConfig:
        """As a configuration."""
        return from_dict(RunSamplesConfig, self.options)

    def chunks(self, split: str = "train") -> PretrainingChunks:
        """Of the samples of a split."""
        return open_chunks(self.samples, split, LENGTH)

    def database(self) -> ChunkDatabase:
        """With tokens."""
        return ChunkDatabase(str(self.folder / "db"), self.prefixes)

    def database_vectors(self) -> Vectors:
        """Of every chunk of the database."""
        database = self.database()
        return embed(database.token_rows(np.arange(len(database)), LENGTH, pad=0))

    def vectors(self, split: str = "train") -> Vectors:
        """Of every chunk of the samples."""
        chunks = self.chunks(split)
        return embed(chunks.token_rows(0, len(chunks)))


def make_yard(folder: Path, names: Sequence[str] = ("en", "de"), documents: int = 60) -> Yard:
    """Corpora, a database of their training documents, and all embeddings."""
    prefixes = [
        write_corpus(folder / name, sentences(documents, seed)) for seed, name in enumerate(names)
    ]
    build(folder, prefixes)
    blend = [word for prefix in prefixes for word in ("1", prefix)]
    options = {
        "data_path": blend,
        "split": "75,25,0",
        "seq_length": SEQ_LENGTH,
        "global_batch_size": 4,
        "train_iters": 6,
        "eval_iters": 1,
    }
    yard = Yard(folder, prefixes, options)
    write_blocks(folder / "embeddings-db", yard.database_vectors(), 100)
    for split in ("train", "valid"):
        write_blocks(folder / f"embeddings-{split}", yard.vectors(split), 37)
    return yard
