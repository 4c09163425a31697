"""Checks a chunk database of another program: whatever reads it relies on its order and counts."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from trainyard.artifacts import store
from trainyard.artifacts.urls import join
from trainyard.errors import DataError
from trainyard.retrieval.chunk_database import ChunkDatabase
from trainyard.retrieval.dataset_infos import DatasetInfo, read_infos
from trainyard.retrieval.hdf5 import ENDING

Ints = NDArray[np.int64]

ROWS = 1 << 20
"""Rows that are looked at together."""

_BLOCK = re.compile(rf"([0-9]{{1,19}})-([0-9]{{1,19}}){re.escape(ENDING)}\Z")


def check_database(folder_url: str, chunk_length: int) -> None:
    """Raise DataError unless the merged databases hold the chunks that their datasets announce, in
    order, each within a document and of `chunk_length` tokens at most; and unless the blocks of
    each dataset, where there are any, are all there."""
    infos = read_infos(folder_url)
    train = [info.n_docs_train for info in infos]
    every = [info.n_docs for info in infos]
    none = [0] * len(infos)
    wanted = {
        "sampled": ([info.n_chunks_sampled for info in infos], none, train),
        "train": ([info.n_chunks_train for info in infos], none, train),
        "valid": ([info.n_chunks - info.n_chunks_train for info in infos], train, every),
    }
    for kind, (counts, low, high) in wanted.items():
        database = ChunkDatabase(folder_url, kind=kind)  # type: ignore[arg-type]
        bounds = np.array([low, high], np.int64)
        found = _check_rows(database, bounds, chunk_length)
        if found.tolist() != counts:
            raise _fault(database.url, f"has {found.tolist()} chunks of the datasets, not {counts}")
        if kind == "train":
            _check_offsets(database, infos)
    for info in infos:
        _check_blocks(folder_url, info)


def _check_rows(database: ChunkDatabase, bounds: Ints, chunk_length: int) -> Ints:
    """(datasets,) chunks of each dataset. bounds: (2, datasets) first document and end."""
    counts = np.zeros(bounds.shape[1], np.int64)
    before = np.full((1, 5), -1, np.int64)
    for begin in range(0, len(database), ROWS):
        rows = database.chunks[begin : begin + ROWS].astype(np.int64)
        dataset, document, start, end, bert = rows.T
        inside = dataset < len(counts)
        number = np.where(inside, dataset, 0)
        inside &= (bounds[0][number] <= document) & (document < bounds[1][number])
        fits = (start < end) & (end - start <= chunk_length) & (start % chunk_length == 0)
        for right, why in (
            (inside, "is of a document that is not in this part of the datasets"),
            (fits & (bert > 0), f"is no chunk of 1 to {chunk_length} tokens with text"),
            (_increases(np.concatenate((before, rows))), "does not come after the one before it"),
        ):
            if not right.all():
                bad = begin + int(np.argmin(right))
                raise _fault(database.url, f"chunk {bad}, {database.rows(bad).tolist()}, {why}")
        counts += np.bincount(dataset, minlength=len(counts))
        before = rows[-1:]
    return counts


def _increases(rows: Ints) -> NDArray[np.bool_]:
    """(n - 1,) whether each row is beyond the one before it by dataset, document and start."""
    beyond = np.zeros(len(rows) - 1, np.bool_)
    equal = ~beyond
    for column in range(3):
        step = np.diff(rows[:, column])
        beyond |= equal & (step > 0)
        equal &= step == 0
    return beyond


def _check_offsets(database: ChunkDatabase, infos: Sequence[DatasetInfo]) -> None:
    """Compare `doc_offsets` with the rows."""
    assert database.doc_offsets is not None
    counts = np.array([info.n_docs_train for info in infos], np.int64)
    begins = np.cumsum(counts) - counts
    held = np.zeros(int(counts.sum()), np.int64)
    for begin in range(0, len(database), ROWS):
        rows = database.chunks[begin : begin + ROWS].astype(np.int64)
        places, numbers = np.unique(begins[rows[:, 0]] + rows[:, 1], return_counts=True)
        held[places] += numbers
    dataset = np.repeat(np.arange(len(infos)), counts)
    columns = (dataset, np.arange(len(held)) - begins[dataset], np.cumsum(held))
    if not np.array_equal(database.doc_offsets, np.stack(columns, axis=1).astype(np.uint64)):
        raise _fault(database.url, "doc_offsets do not count the chunks of each training document")


def _check_blocks(folder_url: str, info: DatasetInfo) -> None:
    folder = join(folder_url, "individual", info.prefix)
    found = sorted(
        (int(match[1]), int(match[2]))
        for name in store.list_files(folder)
        if (match := _BLOCK.match(name))
    )
    expected = 0
    for start, end in found:
        if start != expected:
            break
        expected = end
    if found and expected != info.n_docs:
        raise _fault(folder, f"its blocks do not hold the documents 0 to {info.n_docs}")


def _fault(url: str, why: str) -> DataError:
    return DataError(f"{url}: {why}; take an undamaged copy, or build the database again")
