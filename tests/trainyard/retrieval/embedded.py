"""Embeddings for tests: clustered vectors in HDF5 blocks."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np

from trainyard.retrieval.vectors import DATASET, EmbeddingBlocks, Vectors, block_name


def clustered(count: int, dimensions: int, seed: int = 0) -> Vectors:
    """Vectors around a hundred centers."""
    rng = np.random.default_rng(seed)
    centers = rng.standard_normal((100, dimensions))
    noise = 0.5 * rng.standard_normal((count, dimensions))
    return (centers[rng.integers(0, 100, count)] + noise).astype(np.float32)


def write_blocks(folder: Path, vectors: Vectors, rows: int) -> EmbeddingBlocks:
    """Write the vectors in blocks of that many rows."""
    (folder / "blocks").mkdir(parents=True, exist_ok=True)
    for start in range(0, len(vectors), rows):
        piece = vectors[start : start + rows]
        name = block_name(start, start + len(piece), len(vectors))
        with h5py.File(folder / name, "w") as file:
            file[DATASET] = piece
    return EmbeddingBlocks.find([str(p) for p in folder.glob("blocks/*.hdf5")], str(folder))
