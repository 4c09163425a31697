"""The reader of chunk databases, on databases that the stage made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from tests.trainyard.retrieval.corpora import ENGLISH, LENGTH, build, write_corpus, write_two
from trainyard.artifacts import store
from trainyard.corpus.indexed import CacheOptions
from trainyard.errors import ArtifactError, ConfigError
from trainyard.retrieval.chunk_database import NO_CHUNK, ChunkDatabase

PAD = 7


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[str]]:
    folder = tmp_path_factory.mktemp("retro")
    prefixes = write_two(folder)
    build(folder, prefixes)
    return str(folder / "db"), prefixes


@pytest.fixture
def database(made: tuple[str, list[str]]) -> ChunkDatabase:
    return ChunkDatabase(*made)


def test_tokens_of_every_chunk_are_those_of_its_document(database: ChunkDatabase) -> None:
    whole = "".join(
        bytes(database.tokens(i).tolist()).decode()
        for i in range(len(database))
        if database.chunks[i, 0] == 0
    )
    assert whole == "".join(ENGLISH[:6]).replace(" " * LENGTH, "")  # a chunk without BERT tokens


def test_rows_of_many_chunks_are_padded(database: ChunkDatabase) -> None:
    ids = np.arange(-1, len(database))[: len(database) // 2 * 2].reshape(2, -1)
    rows = database.token_rows(ids, LENGTH, PAD)
    assert rows.shape == (*ids.shape, LENGTH)
    for i, row in zip(ids.ravel().tolist(), rows.reshape(-1, LENGTH), strict=True):
        tokens = [] if i == NO_CHUNK else database.tokens(i).tolist()
        assert row.tolist() == tokens + [PAD] * (LENGTH - len(tokens))
    assert database.token_rows([0], 3, PAD).tolist() == [[*b"the"]]


def test_a_continuation_never_crosses_a_document(database: ChunkDatabase) -> None:
    ids = np.arange(len(database))
    following = database.continuations(ids)
    for i, after in enumerate(following.tolist()):
        documents = [tuple(row[:2]) for row in database.chunks[i : i + 2].tolist()]
        same = len(documents) == 2 and documents[0] == documents[1]
        assert after == (i + 1 if same else NO_CHUNK)
    assert {NO_CHUNK, 1} <= set(following.tolist())


def test_no_chunk_is_never_a_chunk(database: ChunkDatabase) -> None:
    assert database.continuations([[NO_CHUNK, 0]]).tolist() == [[NO_CHUNK, 1]]
    assert database.continuations([len(database) - 1]).tolist() == [NO_CHUNK]
    with pytest.raises(IndexError, match=r"chunk -1 of .*train.hdf5: there are"):
        database.rows([0, NO_CHUNK])
    with pytest.raises(IndexError, match=f"chunk {len(database)} of"):
        database.rows(len(database))


def test_no_file_is_opened_to_read_chunks(
    database: ChunkDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a file was opened")

    monkeypatch.setattr(h5py, "File", refuse)
    monkeypatch.setattr("builtins.open", refuse)
    database.rows(np.arange(len(database)))
    database.token_rows(database.continuations(np.arange(len(database))), LENGTH, PAD)


def test_offsets_of_documents_are_those_of_their_chunks(database: ChunkDatabase) -> None:
    assert database.doc_offsets is not None
    begin = 0
    for dataset, document, end in database.doc_offsets.tolist():
        rows = database.chunks[begin:end].tolist()
        assert {tuple(row[:2]) for row in rows} <= {(dataset, document)}
        begin = end
    assert begin == len(database)
    assert len(database.doc_offsets) == sum(info.n_docs_train for info in database.infos)


def test_other_token_files_are_refused(made: tuple[str, list[str]], tmp_path: Path) -> None:
    url, prefixes = made
    with pytest.raises(ConfigError, match=r"names de .5 documents., en .* cut from en"):
        ChunkDatabase(url, prefixes[::-1])
    shorter = write_corpus(tmp_path / "en", ENGLISH[1:])
    with pytest.raises(ConfigError, match=r"en .7 documents., .* cut from en .8 documents"):
        ChunkDatabase(url, [shorter, prefixes[1]])


def test_a_missing_or_damaged_database_is_named(tmp_path: Path, made: tuple[str, Any]) -> None:
    with pytest.raises(ArtifactError, match=r"indexed_dataset_infos.json is missing"):
        ChunkDatabase(str(tmp_path))
    for name in ("indexed_dataset_infos.json", "merged/train.hdf5"):
        data = store.read_bytes(store.join(made[0], name))
        store.write_bytes(str(tmp_path / name), data[: len(data) // 2 if "5" in name else None])
    with pytest.raises(
        ArtifactError, match=r"train.hdf5: no array .chunks. to read: .* are not in the file"
    ):
        ChunkDatabase(str(tmp_path))


@pytest.mark.slow
def test_a_database_in_an_object_store_reads_alike(
    made: tuple[str, list[str]], s3_url: str, tmp_path: Path
) -> None:
    url, prefixes = made
    for name in ("indexed_dataset_infos.json", "merged/train.hdf5"):
        store.write_bytes(store.join(s3_url, "db", name), store.read_bytes(store.join(url, name)))
    for name in ("en.bin", "en.idx", "de.bin", "de.idx"):
        data = store.read_bytes(store.join(Path(url).parent.as_posix(), name))
        store.write_bytes(store.join(s3_url, name), data)
    remote = [store.join(s3_url, name) for name in ("en", "de")]
    cache = CacheOptions(folder=tmp_path)
    far, near = (
        ChunkDatabase(store.join(s3_url, "db"), remote, cache=cache),
        ChunkDatabase(url, prefixes),
    )
    ids = np.arange(len(near))
    assert (far.chunks == near.chunks).all()
    assert (far.token_rows(ids, LENGTH, PAD) == near.token_rows(ids, LENGTH, PAD)).all()
