"""Some chunks of a training's samples with their nearest neighbours, for people to look at.

`examples.json`, beside a table of neighbours, holds tokens and not text: whoever searches for
neighbours needs no tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainyard.retrieval.chunk_database import NO_CHUNK, ChunkDatabase
from trainyard.retrieval.pretraining_chunks import NO_TOKEN, PretrainingChunks

EXAMPLES = "examples.json"
FORMAT_VERSION = 1

SEED = 1234
COUNT = 6
"""Chunks that are shown."""
NEIGHBORS = 3
"""Neighbours of each, the nearest ones."""

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleNeighbor:
    """A neighbour, and where it is from."""

    chunk: int
    """Its number in the database."""
    dataset: str
    document: int
    distance: float
    """Squared Euclidean."""
    tokens: tuple[int, ...]
    continuation: tuple[int, ...]
    """Tokens of the next chunk of its document; none after the last one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A chunk of a sample."""

    sample: int
    chunk: int
    """Its place in the sample."""
    tokens: tuple[int, ...]
    neighbors: tuple[ExampleNeighbor, ...]
    """Nearest first."""


def chosen_chunks(num_chunks: int, count: int = COUNT) -> list[int]:
    """Chunks to show, a seeded sample in increasing order."""
    drawn = np.random.default_rng(SEED).choice(num_chunks, min(count, num_chunks), replace=False)
    chosen: list[int] = np.sort(drawn).tolist()
    return chosen


def make_example(
    number: int, chunks: PretrainingChunks, database: ChunkDatabase, ids: Ints, distances: Floats
) -> Example:
    """The chunk `number` with its nearest neighbours.

    database: opened with its token files. ids, distances: (k,) its row of the table."""
    sample, place = divmod(number, chunks.chunks_per_sample)
    tokens = chunks.token_rows(number, number + 1)[0]
    held = [(i, d) for i, d in zip(ids.tolist(), distances.tolist(), strict=True) if i != NO_CHUNK]
    return Example(
        sample=sample,
        chunk=place,
        tokens=tuple(tokens[tokens != NO_TOKEN].tolist()),
        neighbors=tuple(_neighbor(database, i, d) for i, d in held[:NEIGHBORS]),
    )


def _neighbor(database: ChunkDatabase, chunk: int, distance: float) -> ExampleNeighbor:
    dataset, document = database.rows(chunk)[:2].tolist()
    following = int(database.continuations(chunk))
    after = () if following == NO_CHUNK else tuple(database.tokens(following).tolist())
    return ExampleNeighbor(
        chunk=chunk,
        dataset=database.infos[dataset].prefix,
        document=document,
        distance=max(distance, 0.0),
        tokens=tuple(database.tokens(chunk).tolist()),
        continuation=after,
    )


def to_document(examples: Sequence[Example]) -> dict[str, Any]:
    """JSON-able."""
    return {"format_version": FORMAT_VERSION, "examples": [asdict(one) for one in examples]}
