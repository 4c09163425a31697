"""Tables of neighbours: which chunks of a database each chunk of the training samples retrieves.

<start>-<end>.hdf5, for every block of chunks, under the name and type of Megatron-LM's Retro:

    neighbors    i64 [n, k]   chunks of the database, nearest first; -1 behind the last
    distances    f32 [n, k]   squared Euclidean distances; infinity for -1

neighbors.json says which samples, database and index they belong to."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import ArrayLike, NDArray

from trainyard.artifacts import inputs, store
from trainyard.artifacts.strict_json import parse_json
from trainyard.corpus.indexed import CacheOptions
from trainyard.corpus.readers import map_listed
from trainyard.errors import ArtifactError, ConfigError
from trainyard.retrieval.checked_fields import check_fields
from trainyard.retrieval.hdf5 import ENDING, range_name
from trainyard.retrieval.mapped import map_array
from trainyard.retrieval.pretraining_chunks import SamplesIdentity, as_document

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]

FORMAT_VERSION = 1
DOCUMENT = "neighbors.json"
NEIGHBORS, DISTANCES = "neighbors", "distances"

OPEN_BLOCKS = 256
"""Blocks that are mapped at a time: each holds a file descriptor."""

_NAME = re.compile(rf"([0-9]{{1,19}})-([0-9]{{1,19}}){re.escape(ENDING)}\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class NeighborsDocument:
    """A table of neighbours."""

    samples: SamplesIdentity
    """Whose chunks have the neighbours, in this order."""
    num_chunks: int
    num_neighbors: int
    """k: columns of the table."""
    database_digest: str
    """Output digest of the chunk database."""
    index_digest: str
    num_neighbors_query: int
    """Chunks that were searched for, from which the neighbours were taken."""
    nprobe: int
    ef_search: int
    mean_neighbors: float
    share_fewer: float
    """Of the chunks: those with fewer than k neighbours."""
    share_none: float
    """Of the chunks: those without a neighbour."""
    evaluation_sets: tuple[str, ...] = ()
    """Digests of token files; no neighbour has a run of tokens of them."""
    evaluation_run: int = 0
    """Tokens of such a run."""

    def to_document(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            "format_version": FORMAT_VERSION,
            **asdict(self),
            "samples": as_document(self.samples),
            "evaluation_sets": list(self.evaluation_sets),
        }

    @staticmethod
    def from_document(document: Mapping[str, Any], where: str) -> NeighborsDocument:
        """The inverse. Raises ArtifactError for a document of another form or version."""
        try:
            values = dict(document)
            if values.pop("format_version") != FORMAT_VERSION:
                raise ValueError("another version")
            identity = SamplesIdentity.from_document(values.pop("samples"))
            sets = tuple(values.pop("evaluation_sets"))
            return check_fields(
                NeighborsDocument(samples=check_fields(identity), evaluation_sets=sets, **values)
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ArtifactError(
                f"{where}: does not describe a table of neighbours ({error!r}); run faiss_query "
                "again"
            ) from error


def block_name(start: int, stop: int, num_chunks: int) -> str:
    """Name of the block of the chunks from `start` up to `stop`."""
    return range_name(start, stop, num_chunks)


def write_block(path: Path, ids: Ints, distances: Floats) -> None:
    """Write the file of a block."""
    with h5py.File(path, "w", libver="earliest") as file:
        file.create_dataset(NEIGHBORS, data=ids)
        file.create_dataset(DISTANCES, data=distances)


class Neighbors:
    """Reads a table that `stages.faiss_query` wrote. A block is opened once, mapped, and compared
    with the manifest of the table before its first row is read; a reader works in any number of
    threads and after a fork."""

    def __init__(self, folder_url: str, cache: CacheOptions | None = None) -> None:
        """Raises ArtifactError for a folder without a whole table."""
        self.url = folder_url
        where = store.join(folder_url, DOCUMENT)
        if not store.exists(where):
            raise ArtifactError(
                f"{where} is missing: not a table of neighbours, or not a finished one; give the "
                "output of faiss_query"
            )
        document = parse_json(inputs.read_checked(where), where)
        self.document = NeighborsDocument.from_document(document, where)
        found = {name: m for name in store.list_files(folder_url) if (m := _NAME.match(name))}
        blocks = sorted((int(m[1]), int(m[2]), name) for name, m in found.items())
        self._names = [name for _, _, name in blocks]
        self._starts = np.array([start for start, _, _ in blocks], np.int64)
        ends = [end for _, end, _ in blocks]
        if [*self._starts.tolist(), len(self)] != [0, *ends]:
            raise ArtifactError(
                f"{folder_url}: its blocks do not hold the chunks 0 to {len(self)}; copy the whole "
                "folder, or run faiss_query again"
            )
        self._records, self._compared = inputs.read_folder(folder_url), set[int]()
        self._cache = cache
        self._block = lru_cache(OPEN_BLOCKS)(self._open)

    def __reduce__(self) -> tuple[type[Neighbors], tuple[Any, ...]]:
        return Neighbors, (self.url, self._cache)

    def __len__(self) -> int:
        """The number of chunks."""
        return self.document.num_chunks

    @property
    def k(self) -> int:
        """Neighbours of a chunk, -1 included."""
        return self.document.num_neighbors

    def rows(self, chunk_numbers: ArrayLike) -> Ints:
        """(..., k) neighbours of these chunks, nearest first; -1 behind the last.

        Raises IndexError for another number."""
        rows: Ints = self._gather(chunk_numbers, NEIGHBORS, np.dtype(np.int64))
        return rows

    def distances(self, chunk_numbers: ArrayLike) -> Floats:
        """(..., k) squared distances of the same neighbours; infinity for -1."""
        rows: Floats = self._gather(chunk_numbers, DISTANCES, np.dtype(np.float32))
        return rows

    def _gather(self, chunk_numbers: ArrayLike, name: str, dtype: np.dtype[Any]) -> NDArray[Any]:
        numbers = np.asarray(chunk_numbers, np.int64)
        bad = numbers[(numbers < 0) | (numbers >= len(self))]
        if bad.size:
            raise IndexError(f"chunk {bad[0]} of {self.url}: there are {len(self)}, from 0")
        flat = numbers.ravel()
        out = np.empty((len(flat), self.k), dtype)
        places = np.searchsorted(self._starts, flat, "right") - 1
        for block in np.unique(places).tolist():
            mine = places == block
            out[mine] = self._block(block, name)[flat[mine] - self._starts[block]]
        return out.reshape(*numbers.shape, self.k)

    def _open(self, block: int, name: str) -> NDArray[Any]:
        url = store.join(self.url, self._names[block])
        self._compare(block, url)
        dtype = "int64" if name == NEIGHBORS else "float32"
        found = map_array(url, name, dtype, self.k, "a block of neighbours", self._cache)
        size = int([*self._starts, len(self)][block + 1] - self._starts[block])
        if len(found) != size:
            raise ArtifactError(
                f"{url}: {len(found)} rows of {name}, wanted {size}; run faiss_query again"
            )
        return found

    def _compare(self, block: int, url: str) -> None:
        """Raise ArtifactError for a block that is not the one in the manifest, if there is one."""
        if block not in self._compared:
            map_listed(url, self._records.get(self._names[block]), self._cache or CacheOptions())
            self._compared.add(block)

    def check(self, samples: SamplesIdentity, database_digest: str | None = None) -> None:
        """Raise ConfigError unless the table is of these samples, and of this database."""
        mine = self.document
        if different := mine.samples.difference(samples):
            raise ConfigError(
                f"{self.url}: neighbours of other samples than those of this training "
                f"({different}); run retro_embed and faiss_query with the options of the training"
            )
        if database_digest is not None and mine.database_digest != database_digest:
            raise ConfigError(
                f"{self.url}: neighbours in the chunk database {mine.database_digest[:12]}, and "
                f"the one given is {database_digest[:12]}; give that of the table, or run "
                "faiss_query on this one"
            )
