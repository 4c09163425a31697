from __future__ import annotations

import tracemalloc
from contextlib import nullcontext
from pathlib import Path

import h5py
import numpy as np
import pytest

from tests.trainyard.retrieval.embedded import clustered, write_blocks
from trainyard.artifacts.digest import digest_bytes
from trainyard.artifacts.inputs import check_in_folder
from trainyard.artifacts.manifest import FileRecord, Manifest, publish
from trainyard.errors import ArtifactError, ConfigError, DataError
from trainyard.retrieval.vectors import DATASET, EmbeddingBlocks


@pytest.mark.parametrize("rows", [1, 7, 100])
def test_blocks_read_in_pieces_are_the_vectors(tmp_path: Path, rows: int) -> None:
    vectors = clustered(23, 4)
    blocks = write_blocks(tmp_path, vectors, rows)
    pieces = list(blocks.read(max_rows=3))
    assert np.array_equal(np.concatenate([piece for _, piece in pieces]), vectors)
    assert [first for first, _ in pieces] == list(
        np.cumsum([0, *(len(piece) for _, piece in pieces)])[:-1]
    )
    ids = np.array([0, 5, 6, 22])
    assert np.array_equal(blocks.rows(ids), vectors[ids])


@pytest.mark.parametrize(("start", "stop"), [(0, 23), (3, 4), (6, 15), (22, 23), (5, 5)])
def test_a_range_is_read_across_blocks(tmp_path: Path, start: int, stop: int) -> None:
    vectors = clustered(23, 4)
    blocks = write_blocks(tmp_path, vectors, 7)
    found = list(blocks.between(start, stop, 3))
    assert [first for first, _ in found] == sorted({first for first, _ in found})
    rows = [row for first, piece in found for row in zip(range(first, 23), piece, strict=False)]
    assert [number for number, _ in rows] == list(range(start, stop))
    assert all(np.array_equal(row, vectors[number]) for number, row in rows)


def test_no_more_than_a_piece_is_in_memory(tmp_path: Path) -> None:
    blocks = write_blocks(tmp_path, clustered(4000, 64), 4000)
    tracemalloc.start()
    try:
        assert sum(len(piece) for _, piece in blocks.read(100)) == 4000
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4000 * 64 * 4 / 4, "a quarter of the block"


def test_a_missing_block_is_named(tmp_path: Path) -> None:
    write_blocks(tmp_path, clustered(30, 4), 10)
    (tmp_path / "blocks/10-20.hdf5").unlink()
    with pytest.raises(DataError, match=r"20-30.hdf5.*vectors 20 to 30.*ends at 10"):
        EmbeddingBlocks.find([str(p) for p in tmp_path.glob("blocks/*")], "it")


def test_a_flipped_bit_of_a_published_block_is_refused(tmp_path: Path) -> None:
    write_blocks(tmp_path, clustered(30, 4), 10)
    files = sorted(tmp_path.glob("blocks/*"))
    records = [
        FileRecord(f"blocks/{f.name}", f.stat().st_size, digest_bytes(f.read_bytes()))
        for f in files
    ]
    publish(str(tmp_path / "manifest.json"), Manifest(stage="embed", files=tuple(records)), None)
    blocks = EmbeddingBlocks.find([str(f) for f in files], "it")
    assert len(blocks.rows(np.arange(30))) == 30
    content = bytearray(files[1].read_bytes())
    content[-1] ^= 1
    files[1].write_bytes(content)
    for name in ("blocks/00-10.hdf5", "blocks/10-20.hdf5"):
        is_damaged = name.endswith("10-20.hdf5")
        with pytest.raises(ArtifactError, match=name) if is_damaged else nullcontext():
            check_in_folder(str(tmp_path), name)
    with pytest.raises(ArtifactError, match=r"blocks/10-20\.hdf5"):
        blocks.rows(np.arange(30))


def test_a_folder_without_blocks_is_refused() -> None:
    with pytest.raises(ConfigError, match="corpus: no embeddings there"):
        EmbeddingBlocks.find(["corpus/a.bin"], "corpus")


def test_a_block_of_the_wrong_shape_is_refused(tmp_path: Path) -> None:
    blocks = write_blocks(tmp_path, clustered(30, 4), 10)
    with h5py.File(tmp_path / "blocks/10-20.hdf5", "w") as file:
        file[DATASET] = np.zeros((10, 5), np.float32)
    with pytest.raises(DataError, match=r"10-20.hdf5: float32 vectors of shape \(10, 5\)"):
        list(blocks.read(100))


@pytest.mark.parametrize("content", [b"", b"no HDF5" * 100])
def test_a_file_that_is_no_hdf5_is_refused(tmp_path: Path, content: bytes) -> None:
    write_blocks(tmp_path, clustered(30, 4), 10)
    (tmp_path / "blocks/00-10.hdf5").write_bytes(content)
    with pytest.raises(
        ArtifactError, match=r"00-10\.hdf5: no array .data. to read: it is not an HDF5 file"
    ):
        EmbeddingBlocks.find([str(p) for p in tmp_path.glob("blocks/*")], "it")


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_an_embedding_that_is_no_number_is_named_by_its_row(tmp_path: Path, value: float) -> None:
    vectors = clustered(30, 4)
    vectors[17, 2] = value
    blocks = write_blocks(tmp_path, vectors, 10)
    with pytest.raises(DataError, match=r"10-20.hdf5: NaN or infinity.*row 7"):
        list(blocks.read(3))
