"""Embeddings: HDF5 blocks, each with the vectors of consecutive ids.

`blocks/<start>-<end>.hdf5` holds rows start (included) to end (excluded) as dataset `data`,
float32 [end - start, dimensions]; start and end are padded with zeros. The blocks of a folder
follow each other from 0. Retro embeds each chunk of its database under the chunk's id."""

from __future__ import annotations

import re
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import h5py
import numpy as np
from numpy.typing import NDArray

from trainyard.artifacts import inputs, store
from trainyard.artifacts.digest import hasher
from trainyard.artifacts.manifest import check_digest
from trainyard.artifacts.store import FileRecord
from trainyard.errors import ArtifactError, ConfigError, DataError
from trainyard.retrieval.hdf5_arrays import StoredArray, find_array

Vectors = NDArray[np.float32]
"""[vectors, dimensions]"""

DATASET = "data"
PIECE_ROWS = 4096
"""Vectors that are in memory while some of them are looked for."""
_NAME = re.compile(r"blocks/([0-9]{1,19})-([0-9]{1,19})\.hdf5\Z")


def block_name(start: int, end: int, total: int) -> str:
    """The file of a block, padded so that names sort by their ids up to `total`."""
    width = len(str(total))
    return f"blocks/{start:0{width}}-{end:0{width}}.hdf5"


def write_block(path: Path, vectors: Vectors) -> None:
    """Write the file of a block; equal vectors are equal bytes."""
    with h5py.File(path, "w", libver="earliest") as file:
        file.create_dataset(DATASET, data=vectors, dtype=np.float32, track_times=False)


@dataclass(frozen=True, slots=True)
class VectorBlock:
    """A file of vectors."""

    url: str
    start: int
    end: int
    record: FileRecord | None = None
    """In the manifest of the embeddings, if they have one."""

    def __len__(self) -> int:
        return self.end - self.start


class EmbeddingBlocks:
    """The blocks of an embedding artifact, in the order of ids."""

    def __init__(self, blocks: Sequence[VectorBlock]) -> None:
        """Raises DataError for missing ids, and for a first block that holds no vectors."""
        self.blocks = tuple(sorted(blocks, key=lambda block: block.start))
        expected = 0
        for block in self.blocks:
            if block.start != expected or block.end <= block.start:
                raise DataError(
                    f"{block.url}: holds vectors {block.start} to {block.end}, and the block "
                    f"before it ends at {expected}; make the embeddings again"
                )
            expected = block.end
        self.num_vectors = expected
        self.dimensions = _dimensions(self.blocks[0])

    @staticmethod
    def find(files: Sequence[str], where: str) -> EmbeddingBlocks:
        """The blocks among the files of an artifact; `where` names it in errors.

        Raises ConfigError if there is none."""
        found = [(url, match) for url in files if (match := _NAME.search(url))]
        if not found:
            raise ConfigError(
                f"{where}: no embeddings there, such as blocks/000000-100000.hdf5; give the "
                "output of the stage that made them"
            )
        manifests = {
            root: inputs.read_folder(root) for root in {url[: m.start()] for url, m in found}
        }
        return EmbeddingBlocks(
            [
                VectorBlock(url, int(m[1]), int(m[2]), manifests[url[: m.start()]].get(m[0]))
                for url, m in found
            ]
        )

    @staticmethod
    def joined(parts: Sequence[EmbeddingBlocks]) -> EmbeddingBlocks:
        """Several embeddings with continuous ids. ConfigError for other dimensions."""
        blocks: list[VectorBlock] = []
        first = 0
        for part in parts:
            if part.dimensions != parts[0].dimensions:
                raise ConfigError(
                    f"{part.blocks[0].url}: of {part.dimensions} dimensions, and the embeddings "
                    f"before it have {parts[0].dimensions}; embed all with the same model"
                )
            blocks += [
                replace(block, start=first + block.start, end=first + block.end)
                for block in part.blocks
            ]
            first += part.num_vectors
        return EmbeddingBlocks(blocks)

    def read(self, max_rows: int) -> Iterator[tuple[int, Vectors]]:
        """The first id and the vectors of each piece of a block, `max_rows` at most."""
        for block in self.blocks:
            yield from self.read_block(block, max_rows)

    def read_block(
        self, block: VectorBlock, max_rows: int
    ) -> Generator[tuple[int, Vectors], None, None]:
        """As `read`, of one block, of which no more than a piece is in memory.

        Raises DataError for NaN and infinity. Raises ArtifactError, after the last piece, for a
        file that is not the one of the manifest: use nothing of a block that was not read to its
        end."""
        size_bytes = store.info(block.url).size_bytes
        with store.open_input(block.url) as stream:
            found = self._find(block, stream, size_bytes)
            stream.seek(0)
            digest, faulty = hasher(), None
            digest.update(_read(stream, found.offset, block))
            for start in range(0, len(block), max_rows):
                count = min(max_rows, len(block) - start)
                content = _read(stream, 4 * count * self.dimensions, block)
                digest.update(content)
                piece = np.frombuffer(content, np.float32).reshape(count, -1)
                faulty = _not_finite(piece, block, start) if faulty is None else faulty
                if faulty is None:
                    yield block.start + start, piece
            digest.update(stream.read())
        if block.record is not None:
            check_digest(block.url, block.record, digest.hexdigest())
        if faulty is not None:  # and not because the file was damaged
            raise faulty

    def between(self, start: int, stop: int, max_rows: int) -> Iterator[tuple[int, Vectors]]:
        """As `read`, of the ids from `start` up to `stop`."""
        for block in self.blocks:
            if block.start < stop and block.end > start:
                for first, piece in self.read_block(block, max_rows):
                    rows = piece[max(start - first, 0) : max(stop - first, 0)]
                    if len(rows):
                        yield max(first, start), rows

    def rows(self, ids: NDArray[np.int64]) -> Vectors:
        """The vectors of increasing ids."""
        out = np.empty((len(ids), self.dimensions), np.float32)
        for block in self.blocks:
            begin, end = np.searchsorted(ids, (block.start, block.end))
            if begin < end:
                for start, piece in self.read_block(block, PIECE_ROWS):
                    first, last = np.searchsorted(ids, (start, start + len(piece)))
                    out[first:last] = piece[ids[first:last] - start]
        return out

    def _find(self, block: VectorBlock, stream: BinaryIO, size_bytes: int) -> StoredArray:
        """Where the vectors of a block lie."""
        found = find_array(stream, size_bytes, DATASET, block.url)
        if found.shape != (len(block), self.dimensions) or found.dtype != np.float32:
            raise DataError(
                f"{block.url}: {found.dtype} vectors of shape {found.shape}, expected float32 "
                f"({len(block)}, {self.dimensions}); make the embeddings again"
            )
        return found


def _read(stream: BinaryIO, size: int, block: VectorBlock) -> bytes:
    content = stream.read(size)
    if len(content) < size:
        raise ArtifactError(f"{block.url}: it was cut short while it was read; run this again")
    return content


def _dimensions(block: VectorBlock) -> int:
    """Of the vectors of a block, whose values are not read."""
    size_bytes = store.info(block.url).size_bytes
    with store.open_input(block.url) as stream:
        found = find_array(stream, size_bytes, DATASET, block.url)
    if len(found.shape) != 2 or found.dtype != np.float32 or not found.shape[1]:
        raise ArtifactError(
            f"{block.url}: {DATASET!r} holds {found.dtype} of shape {found.shape}, not float32 "
            "vectors; make the embeddings again"
        )
    return found.shape[1]


def _not_finite(vectors: Vectors, block: VectorBlock, start: int) -> DataError | None:
    """The error about the first row with NaN or infinity, if there is one."""
    # A sum is finite if its terms are, unless it overflows; then each row is looked at.
    if np.isfinite(vectors.sum()):
        return None
    bad = np.flatnonzero(~np.isfinite(vectors).all(axis=1))
    if not bad.size:
        return None
    return DataError(
        f"{block.url}: NaN or infinity in the embedding of row {start + bad[0]}; it cannot be "
        "searched for, so find out why the embedder made it"
    )
