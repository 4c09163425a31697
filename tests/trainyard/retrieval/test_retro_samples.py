"""Samples with neighbours: what they hold, and what is refused before training."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.trainyard.retrieval.corpora import LENGTH
from tests.trainyard.retrieval.projects import make_project
from tests.trainyard.retrieval.samples import SEQ_LENGTH, Yard, make_yard
from tests.trainyard.retrieval.tables import random_table, write_table
from trainyard.artifacts.digest import digest_bytes
from trainyard.artifacts.manifest import Manifest, publish
from trainyard.artifacts.store import FileRecord
from trainyard.datasets.config import DataConfig
from trainyard.errors import ArtifactError, ConfigError
from trainyard.retrieval import chunk_database
from trainyard.retrieval.options import RetrievalConfig
from trainyard.retrieval.pretraining_chunks import PretrainingChunks
from trainyard.retrieval.retro_samples import RetroSamples
from trainyard.retrieval.run_neighbors import RunNeighbors, check_tables
from trainyard.retrieval.shape import NeighborShape
from trainyard.training.run_samples import open_chunks

K, RETRIEVED = 3, 2
SHAPE = NeighborShape(
    seq_length=SEQ_LENGTH,
    chunk_length=LENGTH,
    num_neighbors=2,
    num_retrieved_chunks=RETRIEVED,
)


@pytest.fixture(scope="module")
def yard(tmp_path_factory: pytest.TempPathFactory) -> Yard:
    yard = make_yard(tmp_path_factory.mktemp("yard"))
    write_table(yard, "train", random_table(yard, "train", K, 1))
    return yard


def chunks_of(yard: Yard) -> PretrainingChunks:
    return open_chunks(yard.samples, "train", LENGTH, vocab_size=257)


def config(yard: Yard, **more: Any) -> RetrievalConfig:
    options = {
        "retro_db": str(yard.folder / "db"),
        "retro_train_neighbors": str(yard.folder / "neighbors-train"),
    }
    return RetrievalConfig(**options | more)


def joined(yard: Yard, shape: NeighborShape = SHAPE, **more: Any) -> RetroSamples:
    chunks, data = chunks_of(yard), yard.samples.data
    opened = RunNeighbors.open(config(yard, **more), data, shape)
    samples = opened.join("train", chunks._dataset, chunks.num_samples)
    assert isinstance(samples, RetroSamples)
    return samples


def test_a_sample_is_a_gpts_with_the_tokens_of_its_neighbours_and_what_follows_them(
    yard: Yard,
) -> None:
    samples, database = joined(yard), yard.database()
    table = random_table(yard, "train", K, 1)
    indices = [5, 0, 17, 5]
    batch = samples.__getitems__(indices)
    plain = chunks_of(yard)._dataset.__getitems__(indices)
    assert {n: batch[n].tolist() for n in plain} == {n: plain[n].tolist() for n in plain}
    assert batch["neighbor_tokens"].shape == (4, 4, 2, RETRIEVED * LENGTH)
    fewer = 0
    for row, index in enumerate(indices):
        for chunk in range(4):
            for place in range(2):
                number = int(table[index * 4 + chunk, place])
                expected: list[int] = []
                if number >= 0:
                    expected = database.tokens(number).tolist()
                    following = int(database.continuations(number))
                    if following >= 0:
                        expected += database.tokens(following).tolist()
                found = batch["neighbor_tokens"][row, chunk, place].tolist()
                assert batch["neighbor_lengths"][row, chunk, place] == len(expected)
                assert found == expected + [0] * (RETRIEVED * LENGTH - len(expected))
                fewer += len(expected) < RETRIEVED * LENGTH
    assert 0 < fewer < 4 * 4 * 2
    one = samples[17]
    assert all(np.array_equal(one[name], batch[name][2]) for name in batch)


def test_a_batch_is_read_by_few_calls(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    samples, calls = joined(yard), []
    original = chunk_database.ChunkDatabase.token_rows
    monkeypatch.setattr(
        chunk_database.ChunkDatabase,
        "token_rows",
        lambda self, *more, **named: calls.append(1) or original(self, *more, **named),
    )
    samples.__getitems__(list(range(24)))
    assert len(calls) == 1


def test_the_neighbours_of_another_order_or_database_are_refused(
    yard: Yard, tmp_path: Path
) -> None:
    other = Yard(yard.folder, yard.prefixes, {**yard.options, "seed": 4321})
    with pytest.raises(ConfigError, match=r"neighbours of other samples .*another order: the seed"):
        joined(other)
    elsewhere = make_yard(tmp_path, names=("fr", "it"))
    with pytest.raises(ConfigError, match=r"neighbours in the chunk database \w{12}, and the one"):
        joined(
            yard,
            retro_db=str(elsewhere.folder / "db"),
            retro_db_data_path=tuple(elsewhere.prefixes),
        )
    with pytest.raises(ConfigError, match="name them with --retro-db-data-path, in the order"):
        joined(yard, retro_db=str(elsewhere.folder / "db"))


def test_a_project_has_the_database_and_the_tables(tmp_path: Path) -> None:
    made = make_project(tmp_path)
    found = RetrievalConfig(retro_project_dir=str(tmp_path))
    assert found.inputs()["retro_db"] == (str(tmp_path / "db"),)
    assert found.inputs()["retro_train_neighbors"] == (str(tmp_path / "query" / "train_1"),)
    assert "retro_valid_neighbors" not in found.inputs()
    chunks = chunks_of(made.yard)
    opened = RunNeighbors.open(found, made.yard.samples.data, SHAPE)
    samples = opened.join("train", chunks._dataset, chunks.num_samples)
    expected = made.yard.database().tokens(int(made.table[0, 0]))
    assert samples[0]["neighbor_tokens"][0, 0, : len(expected)].tolist() == expected.tolist()
    assert not samples[chunks.num_samples - 1]["neighbor_lengths"][-1].any()
    with pytest.raises(ConfigError, match="names no neighbours for valid; name them there, or wit"):
        opened.join("valid", chunks._dataset, 1)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"num_neighbors": 9}, r"--retro-num-neighbors \(9\): .* has 3 for each chunk"),
        ({"seq_length": 64}, "seq_length 32, not 64"),
        ({"chunk_length": 4}, "chunk_length 8, not 4"),
    ],
)
def test_a_table_is_refused_by_what_it_says(
    yard: Yard, shape: dict[str, int], message: str
) -> None:
    check_tables(config(yard), yard.samples.data, SHAPE, ("train", "valid"))
    with pytest.raises(ConfigError, match=message):
        check_tables(config(yard), yard.samples.data, replace(SHAPE, **shape), ("train",))


def test_more_neighbours_than_the_table_has_are_refused(yard: Yard) -> None:
    with pytest.raises(ConfigError, match=r"--retro-num-neighbors \(4\): .* has 3 for each chunk"):
        joined(yard, replace(SHAPE, num_neighbors=4))


def test_chunks_of_another_length_are_refused(yard: Yard) -> None:
    database = yard.database()
    neighbors = joined(yard).neighbors
    for length in (LENGTH // 2, LENGTH * 2):
        shape = replace(SHAPE, chunk_length=length)
        with pytest.raises(
            ConfigError, match=rf"--retro-chunk-length \({length}\): .* chunks of 8 t"
        ):
            RetroSamples(chunks_of(yard)._dataset, neighbors, database, shape)


def test_data_of_no_document_is_refused(yard: Yard) -> None:
    with pytest.raises(ConfigError, match="--mock-data has no documents"):
        RunNeighbors.open(config(yard), DataConfig(mock_data=True), SHAPE)


def test_options_that_need_others_are_refused() -> None:
    with pytest.raises(
        ConfigError, match="--retro-valid-neighbors needs --retro-db and --retro-tr"
    ):
        RetrievalConfig(retro_valid_neighbors="x")


def test_a_damaged_database_is_refused_before_a_training(yard: Yard, tmp_path: Path) -> None:
    shutil.copytree(yard.folder / "db", tmp_path / "db")
    merged = tmp_path / "db/merged/train.hdf5"
    whole = merged.read_bytes()
    record = FileRecord("merged/train.hdf5", len(whole), digest_bytes(whole))
    manifest = Path(tmp_path, "db/manifest.json")
    manifest.unlink(missing_ok=True)
    publish(str(manifest), Manifest(stage="retro_db", files=(record,)), None)
    merged.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(ArtifactError, match=r"merged/train\.hdf5: digest .* is damaged"):
        check_tables(
            config(yard, retro_db=str(tmp_path / "db")), yard.samples.data, SHAPE, ("train",)
        )
