"""The leak test: no chunk of a training sample may retrieve what the sample itself contains.

It reads the finished table and compares documents by the rows of the database, not by the ranges of
chunks that the filter of the search uses."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from trainyard.errors import DataError
from trainyard.retrieval.chunk_database import NO_CHUNK, ChunkDatabase
from trainyard.retrieval.pretraining_chunks import PretrainingChunks

Ints = NDArray[np.int64]

DOCUMENT_BITS = 32

CHANGED = (
    "the table is not published: a block was changed after it was written, so remove the output "
    "and run the stage again; if that does not help, it is a defect, please report it"
)


def check_neighbors(
    ids: Ints,
    start: int,
    chunks: PretrainingChunks,
    database: ChunkDatabase,
    pairs: list[tuple[int, int]],
    excluded: NDArray[np.bool_] | None = None,
    advice: str = CHANGED,
) -> None:
    """Raise DataError unless all neighbours of the chunks from `start` on are allowed.

    ids: (n, k). pairs: (dataset of the samples, dataset of the database) with the same documents.
    excluded: (chunks of the database,) what may be no neighbour of any chunk.
    advice: the end of the message."""

    def refuse(wrong: NDArray[np.bool_], of: Ints, why: str) -> None:
        if wrong.any():
            row, column = np.argwhere(wrong)[0].tolist()
            raise DataError(
                f"leak test: neighbour {of[row, column]} of chunk {start + row} {why}; {advice}"
            )

    held = ids != NO_CHUNK
    refuse(held & ((ids < 0) | (ids >= len(database))), ids, "is no chunk of the database")
    refuse(held[:, 1:] & ~held[:, :-1], ids[:, 1:], "follows -1, which is only behind")
    sample_of_row = (start + np.arange(len(ids))) // chunks.chunks_per_sample
    is_own = np.zeros(ids.shape, np.bool_)
    row, column = np.nonzero(held)
    found = database.rows(ids[row, column]).astype(np.int64)
    first, last = (int(sample_of_row[0]), int(sample_of_row[-1]) + 1) if len(ids) else (0, 0)
    own = chunks.documents(first, last)
    for place, number in pairs:
        mine = own[own[:, 1] == place]
        here = found[:, 0] == number
        keys = (sample_of_row[row[here]] << DOCUMENT_BITS) + found[here, 1]
        is_own[row[here], column[here]] |= np.isin(keys, (mine[:, 0] << DOCUMENT_BITS) + mine[:, 2])
    refuse(is_own, ids, "is of a document of the chunk's own sample")
    if excluded is not None:
        repeats = np.zeros(ids.shape, np.bool_)
        repeats[row, column] = excluded[ids[row, column]]
        refuse(repeats, ids, "repeats an evaluation set")
