"""Tables of neighbours by decree, bound to samples and database like those of faiss_query."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tests.trainyard.retrieval.samples import Yard
from trainyard.artifacts import inputs
from trainyard.retrieval.neighbors import NeighborsDocument, block_name, write_block


def database_digest(yard: Yard) -> str:
    """Of the chunk database."""
    return inputs.resolve("retro_db", (str(yard.folder / "db"),)).digest


def write_table(yard: Yard, split: str, table: NDArray[np.int64], block: int = 30) -> str:
    """Write the neighbours (n, k) of the chunks of a split; returns the folder."""
    folder: Path = yard.folder / f"neighbors-{split}"
    folder.mkdir(exist_ok=True)
    for start in range(0, len(table), block):
        ids = table[start : start + block]
        name = block_name(start, start + len(ids), len(table))
        write_block(folder / name, ids, ids.astype(np.float32))
    document = NeighborsDocument(
        samples=yard.chunks(split).identity(),
        num_chunks=len(table),
        num_neighbors=table.shape[1],
        database_digest=database_digest(yard),
        index_digest="e" * 64,
        num_neighbors_query=200,
        nprobe=1,
        ef_search=1,
        mean_neighbors=1.0,
        share_fewer=0.0,
        share_none=0.0,
    )
    (folder / "neighbors.json").write_text(json.dumps(document.to_document()))
    return str(folder)


def random_table(yard: Yard, split: str, k: int, seed: int) -> NDArray[np.int64]:
    """Any chunks, -1 behind fewer than k, and none at all for one chunk in eight."""
    rng = np.random.default_rng(seed)
    count = len(yard.chunks(split))
    table = rng.integers(len(yard.database()), size=(count, k))
    held = np.where(np.arange(count) % 8 == 3, 0, rng.integers(1, k + 1, count))
    return np.where(np.arange(k) < held[:, None], table, -1)
