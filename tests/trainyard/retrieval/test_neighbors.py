"""Tables of neighbours as training reads them."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from trainyard.artifacts.digest import digest_bytes
from trainyard.artifacts.manifest import Manifest, publish
from trainyard.artifacts.store import FileRecord
from trainyard.errors import ArtifactError, ConfigError
from trainyard.retrieval import neighbors as module
from trainyard.retrieval.neighbors import Neighbors, NeighborsDocument, block_name, write_block
from trainyard.retrieval.pretraining_chunks import SamplesIdentity

SAMPLES = SamplesIdentity(
    split="train", seq_length=16, chunk_length=4, num_samples=25, data=("a" * 64,), order="b" * 64
)
TABLE = np.random.default_rng(0).integers(-1, 500, (100, 3))


@pytest.fixture
def folder(tmp_path: Path) -> str:
    write(tmp_path, TABLE, 30)
    return str(tmp_path)


def write(folder: Path, table: NDArray[np.int64], size: int) -> None:
    for start in range(0, len(table), size):
        ids = table[start : start + size]
        name = block_name(start, start + len(ids), len(table))
        write_block(folder / name, ids, ids.astype(np.float32))
    document = NeighborsDocument(
        samples=SAMPLES,
        num_chunks=len(table),
        num_neighbors=table.shape[1],
        database_digest="d" * 64,
        index_digest="e" * 64,
        num_neighbors_query=200,
        nprobe=4,
        ef_search=256,
        mean_neighbors=2.5,
        share_fewer=0.1,
        share_none=0.0,
        evaluation_sets=("f",),
        evaluation_run=32,
    )
    (folder / "neighbors.json").write_text(json.dumps(document.to_document()))


def test_rows_are_those_of_the_blocks_in_any_order_and_shape(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "OPEN_BLOCKS", 2)  # so blocks are closed and opened again
    numbers = np.random.default_rng(1).permutation(100).reshape(5, 20)
    for table in (Neighbors(folder), pickle.loads(pickle.dumps(Neighbors(folder)))):
        assert (len(table), table.k) == (100, 3)
        np.testing.assert_array_equal(table.rows(numbers), TABLE[numbers])
        np.testing.assert_array_equal(table.distances(7), TABLE[7])
    with pytest.raises(IndexError, match=r"chunk 100 of .*: there are 100"):
        table.rows([3, 100])


def test_a_block_is_opened_once(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []
    original = module.map_array
    monkeypatch.setattr(
        module, "map_array", lambda url, *more: (opened.append(url), original(url, *more))[1]
    )
    table = Neighbors(folder)
    for number in [*range(100), *range(100)]:
        table.rows(number)
    assert len(opened) == len(set(opened)) == 4


def test_a_damaged_block_or_description_is_refused_when_it_is_read(folder: str) -> None:
    files = sorted(Path(folder).iterdir())
    records = [FileRecord(f.name, f.stat().st_size, digest_bytes(f.read_bytes())) for f in files]
    publish(f"{folder}/manifest.json", Manifest(stage="query", files=tuple(records)), None)
    assert Neighbors(folder).rows(np.arange(100)).tolist() == TABLE.tolist()
    block, document = Path(folder, block_name(30, 60, 100)), Path(folder, "neighbors.json")
    flip(block)
    table = Neighbors(folder)
    assert table.rows(np.r_[0:30, 60:100]).shape == (70, 3)
    for _ in range(2):
        with pytest.raises(ArtifactError, match=rf"{block.name}: digest .* is damaged"):
            table.rows(45)
    document.write_text(document.read_text().replace("0.1", "0.2"))
    with pytest.raises(ArtifactError, match=r"neighbors\.json: digest .* is damaged"):
        Neighbors(folder)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_the_description_is_read_as_it_was_written(folder: str) -> None:
    document = Neighbors(folder).document
    assert NeighborsDocument.from_document(document.to_document(), "") == document


def test_samples_and_database_of_the_table_are_accepted(folder: str) -> None:
    Neighbors(folder).check(SAMPLES, "d" * 64)
    Neighbors(folder).check(SAMPLES)


@pytest.mark.parametrize(
    ("samples", "words"),
    [
        (replace(SAMPLES, seq_length=32), "seq_length 16, not 32"),
        (replace(SAMPLES, num_samples=26), "num_samples 25, not 26"),
        (replace(SAMPLES, data=("c" * 64,)), "other token files: aaaaaaaaaaaa, not cccccccccccc"),
        (replace(SAMPLES, order="c" * 64), "another order: the seed"),
    ],
)
def test_other_samples_are_refused(folder: str, samples: SamplesIdentity, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        Neighbors(folder).check(samples)
    assert "run retro_embed and faiss_query with the options of the training" in str(caught.value)


def test_another_database_is_refused(folder: str) -> None:
    with pytest.raises(ConfigError, match="database dddddddddddd, and the one given is cccccccc"):
        Neighbors(folder).check(SAMPLES, "c" * 64)


def test_a_folder_without_a_whole_table_is_refused(folder: str, tmp_path: Path) -> None:
    (tmp_path / "030-060.hdf5").rename(tmp_path / "aside")
    with pytest.raises(ArtifactError, match="its blocks do not hold the chunks 0 to 100"):
        Neighbors(folder)
    (tmp_path / "aside").rename(tmp_path / "030-060.hdf5")
    (tmp_path / "090-100.hdf5").write_bytes(b"no HDF5")
    with pytest.raises(
        ArtifactError, match=r"no array .neighbors. to read: it is not an HDF5 file"
    ):
        Neighbors(folder).rows(95)
    (tmp_path / "neighbors.json").write_text('{"format_version": 1}')
    with pytest.raises(ArtifactError, match="does not describe a table of neighbours"):
        Neighbors(folder)
    (tmp_path / "neighbors.json").unlink()
    with pytest.raises(ArtifactError, match="not a table of neighbours, or not a finished one"):
        Neighbors(folder)
