"""Reads a chunk database: rows, documents, continuations and tokens of chunks, many at a time.

Files are opened once and mapped, so a read costs no call of HDF5; a reader works in any number of
threads and after a fork. A chunk has a number, its place in the merged database; -1 means no
chunk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from trainyard.artifacts import store
from trainyard.corpus.indexed import CacheOptions, IndexedDataset
from trainyard.errors import ArtifactError, ConfigError
from trainyard.retrieval.dataset_infos import read_infos
from trainyard.retrieval.dataset_names import dataset_names, has_name
from trainyard.retrieval.hdf5 import merged_name
from trainyard.retrieval.mapped import map_array

Ints = NDArray[np.int64]

NO_CHUNK = -1
"""The number that stands for no chunk, such as padding after the last neighbour."""

WHAT = "a chunk database"


class ChunkDatabase:
    """One of the merged databases that `stages.retro_db` writes.

    folder_url: its output. data_path: prefixes of the token files, in the order of --data-path
    there, without weights; empty if no tokens are read."""

    def __init__(
        self,
        folder_url: str,
        data_path: Sequence[str] = (),
        kind: Literal["sampled", "train", "valid"] = "train",
        cache: CacheOptions | None = None,
    ) -> None:
        self.url = store.join(folder_url, merged_name(kind))
        self.infos = read_infos(folder_url)
        self.chunks: NDArray[np.uint32] = map_array(self.url, "chunks", "uint32", 5, WHAT, cache)
        """(n, 5) dataset, document, start, end, BERT tokens; a view of the file."""
        self.doc_offsets: NDArray[np.uint64] | None = None
        """(d, 3) dataset, document, number of chunks up to its end; only of `train`."""
        if kind == "train":
            self.doc_offsets = map_array(self.url, "doc_offsets", "uint64", 3, WHAT, cache)
        self._tokens = [IndexedDataset(prefix, cache=cache) for prefix in data_path]
        self._check_tokens(data_path)

    def _check_tokens(self, data_path: Sequence[str]) -> None:
        """Refuse token files that are not those the chunks were cut from, by name and size."""
        if not data_path:
            return
        counts = [tokens.num_documents for tokens in self._tokens]
        # Megatron-LM names a dataset by more of its path than is needed to tell it from others.
        same = len(counts) == len(self.infos) and all(
            has_name(prefix, info.prefix) and count == info.n_docs
            for prefix, count, info in zip(data_path, counts, self.infos, strict=True)
        )
        if not same:
            given = zip(dataset_names(data_path), counts, strict=True)
            wanted = ((info.prefix, info.n_docs) for info in self.infos)
            mine, theirs = (
                ", ".join(f"{n} ({d} documents)" for n, d in x) for x in (given, wanted)
            )
            raise ConfigError(
                f"--data-path names {mine}, but {self.url} was cut from {theirs}; give the same "
                "prefixes in the same order"
            )

    def __len__(self) -> int:
        """The number of chunks."""
        return len(self.chunks)

    def rows(self, ids: ArrayLike) -> NDArray[np.uint32]:
        """(..., 5) the rows of `chunks` for these chunks. Raises IndexError for another number."""
        numbers = np.asarray(ids, np.int64)
        bad = numbers[(numbers < 0) | (numbers >= len(self))]
        if bad.size:
            raise IndexError(f"chunk {bad[0]} of {self.url}: there are {len(self)}, from 0")
        found: NDArray[np.uint32] = self.chunks[numbers]
        return found

    def continuations(self, ids: ArrayLike) -> Ints:
        """The chunk after each of these in its document; `NO_CHUNK` after the last chunk of a
        document, and for `NO_CHUNK`."""
        numbers = np.asarray(ids, np.int64)
        has_next = (numbers >= 0) & (numbers < len(self) - 1)
        here = np.where(has_next, numbers, 0)
        following = np.full(numbers.shape, NO_CHUNK, np.int64)
        if has_next.any():
            same = self.rows(here)[..., :2] == self.rows(here + 1)[..., :2]
            following = np.where(has_next & same.all(axis=-1), numbers + 1, NO_CHUNK)
        return following

    def lengths(self, ids: ArrayLike) -> Ints:
        """(...) GPT tokens of these chunks; 0 for `NO_CHUNK`."""
        numbers = np.asarray(ids, np.int64)
        rows = self.rows(np.maximum(numbers, 0)) if numbers.size else np.zeros((0, 5), np.uint32)
        counts = rows[..., 3].astype(np.int64) - rows[..., 2]
        return np.where(numbers == NO_CHUNK, 0, counts)

    def _places(self, ids: Ints) -> NDArray[np.int64]:
        """(n, 5) rows of these chunks. Raises ArtifactError for one outside of its document."""
        rows = self.rows(ids).astype(np.int64)
        ends = np.full(len(rows), -1)
        for dataset in np.unique(rows[:, 0]).tolist():
            if dataset < len(self._tokens):
                source = self._tokens[dataset]
                mine = (rows[:, 0] == dataset) & (rows[:, 1] < source.num_documents)
                begins, stops = (source.document_places(rows[mine, 1] + i) for i in (0, 1))
                ends[mine] = stops - begins
        bad = np.flatnonzero((rows[:, 2] > rows[:, 3]) | (rows[:, 3] > ends))
        if bad.size:
            dataset, document, start, end, _ = rows[bad[0]].tolist()
            raise ArtifactError(
                f"{self.url}: chunk {ids[bad[0]]} is tokens {start} to {end} of document "
                f"{document} of dataset {dataset}, which are not in --data-path; build the "
                "database again"
            )
        return rows

    def tokens(self, chunk: int) -> NDArray[Any]:
        """GPT tokens of one chunk, in the type of its file."""
        dataset, document, start, end, _ = self._places(np.array([chunk]))[0].tolist()
        source = self._tokens[dataset]
        begin = int(source.document_places(np.array([document]))[0])
        found: NDArray[Any] = source.get_flat(begin + start, begin + end)
        return found

    def token_rows(self, ids: ArrayLike, length: int, pad: int) -> Ints:
        """(..., length) the first GPT tokens of these chunks, padded with `pad`; all padding for
        `NO_CHUNK`."""
        numbers = np.asarray(ids, np.int64)
        out = np.full((numbers.size, length), pad, np.int64)
        held = np.flatnonzero(numbers.ravel() != NO_CHUNK)
        rows = self._places(numbers.ravel()[held])
        for dataset in np.unique(rows[:, 0]).tolist():
            source, mine = self._tokens[dataset], rows[:, 0] == dataset
            begins = source.document_places(rows[mine, 1]) + rows[mine, 2]
            counts = np.minimum(rows[mine, 3] - rows[mine, 2], length)
            _gather(source, begins, counts, out, held[mine])
        return out.reshape(*numbers.shape, length)

    def flat_ranges(self, ids: Ints) -> Iterator[tuple[int, int, NDArray[Any], Ints, Ints]]:
        """Consecutive chunks with all tokens around them, by dataset: the first chunk and the end,
        the tokens, and where in these each chunk begins and ends."""
        rows = self._places(ids)
        for dataset in np.unique(rows[:, 0]).tolist():
            mine = np.flatnonzero(rows[:, 0] == dataset)
            source = self._tokens[dataset]
            begins = source.document_places(rows[mine, 1])
            ends = begins + rows[mine, 3]
            begins += rows[mine, 2]
            low, high = int(begins.min()), int(ends.max())
            tokens = source.get_flat(low, high)
            yield int(ids[mine[0]]), int(ids[mine[-1]]) + 1, tokens, begins - low, ends - low


def _gather(source: IndexedDataset, begins: Ints, counts: Ints, out: Ints, places: Ints) -> None:
    """Put `counts` tokens from `begins` on into the rows `places` of `out`."""
    if source.tokens is None:  # each is a read of its own
        for place, begin, count in zip(places, begins.tolist(), counts.tolist(), strict=True):
            out[place, :count] = source.get_flat(begin, begin + count)
        return
    for begin, count in zip(begins.tolist(), counts.tolist(), strict=True):
        source.check(begin, begin + count)
    row, column = np.nonzero(np.arange(out.shape[1]) < counts[:, None])
    out[places[row], column] = source.tokens[begins[row] + column]
