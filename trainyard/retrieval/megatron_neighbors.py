"""Tables of neighbours as Megatron-LM writes them: blocks alone, without a document about them.

<start>-<end>.hdf5 holds `neighbors`, i64 [n, k]; -1 behind the last. Blocks of ours have
`distances` too, f32 [n, k]; without them every distance is NaN, and infinity for -1."""

from __future__ import annotations

import io
import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainyard.artifacts import store
from trainyard.artifacts.urls import join
from trainyard.errors import ArtifactError
from trainyard.retrieval.chunk_database import NO_CHUNK
from trainyard.retrieval.hdf5 import ENDING
from trainyard.retrieval.hdf5_arrays import find_array, has_array
from trainyard.retrieval.neighbors import DISTANCES, NEIGHBORS, Floats, Ints

_NAME = re.compile(rf"([0-9]{{1,19}})-([0-9]{{1,19}}){re.escape(ENDING)}\Z")


class MegatronNeighbors:
    """A table, a block at a time."""

    def __init__(self, folder_url: str, num_chunks: int) -> None:
        """num_chunks: of the samples that the table is for. Raises ArtifactError unless its blocks
        hold as many."""
        self.url = folder_url
        found = {
            name: match for name in store.list_files(folder_url) if (match := _NAME.match(name))
        }
        self.blocks = sorted((int(m[1]), int(m[2]), name) for name, m in found.items())
        """First chunk, end and name of each block."""
        starts, ends = ([block[place] for block in self.blocks] for place in (0, 1))
        if [*starts, num_chunks] != [0, *ends]:
            raise ArtifactError(
                f"{folder_url}: its blocks do not hold the chunks 0 to {num_chunks} of the samples "
                "of config.json; copy the whole folder, or compare the options with those of the "
                "training"
            )
        self.k = self._read(*self.blocks[0])[0].shape[1]
        """Neighbours of a chunk, -1 included."""

    def read(self, start: int, stop: int, name: str) -> tuple[Ints, Floats]:
        """(n, k) neighbours and distances of a block.

        Raises ArtifactError for a block of another form."""
        ids, distances = self._read(start, stop, name)
        for what, values in ((NEIGHBORS, ids), (DISTANCES, distances)):
            if values.shape != (stop - start, self.k):
                raise ArtifactError(
                    f"{join(self.url, name)}: {what} of shape {values.shape}, not "
                    f"({stop - start}, {self.k})"
                )
        return ids, distances

    def _read(self, start: int, stop: int, name: str) -> tuple[Ints, Floats]:
        url = join(self.url, name)
        content = store.read_bytes(url)
        ids = _array(content, NEIGHBORS, "int64", url)
        if has_array(io.BytesIO(content), len(content), DISTANCES, url):
            return ids, _array(content, DISTANCES, "float32", url)
        unknown = np.where(ids == NO_CHUNK, np.float32(np.inf), np.float32(np.nan))
        return ids, unknown.astype(np.float32)


def _array(content: bytes, name: str, dtype: str, url: str) -> NDArray[Any]:
    found = find_array(io.BytesIO(content), len(content), name, url).within(content)
    if found.dtype != dtype or found.ndim != 2:
        raise ArtifactError(
            f"{url}: {name} holds {found.dtype} of shape {found.shape}, not {dtype} of shape (n, k)"
        )
    return found
