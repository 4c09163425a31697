"""Chunk databases, embeddings and indices of others: no file of theirs reads or writes another one,
takes more memory than it has bytes, or ends in a crash."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from stages.retro_explore.calls import shown
from tests.security.test_shown_text import STEERING
from tests.trainyard.retrieval.corpora import build, write_two
from trainyard.errors import ArtifactError, ConfigError
from trainyard.retrieval.chunk_database import ChunkDatabase
from trainyard.retrieval.hdf5 import read_block
from trainyard.retrieval.index_document import IndexDocument
from trainyard.retrieval.neighbors import Neighbors, NeighborsDocument, block_name, write_block
from trainyard.retrieval.project import read_project
from trainyard.retrieval.vectors import EmbeddingBlocks

SECRET = b"of another user\0" * 64

Plant = Callable[[h5py.Group, str, tuple[int, int], str, Path], None]
"""Write an array of that name, shape and type, that is more than that; folder: has what it may
lead to."""


def external_link(file: Any, name: str, _: Any, dtype: str, folder: Path) -> None:
    with h5py.File(folder / "other.h5", "w") as other:
        other[name] = np.ones((2, 5), dtype)
    file[name] = h5py.ExternalLink(str(folder / "other.h5"), name)


def values_in_another_file(file: Any, name: str, shape: Any, dtype: str, folder: Path) -> None:
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    file.create_dataset(name, shape, dtype, external=[(str(folder / "secret"), 0, size)])


def values_in_passwd(file: Any, name: str, shape: Any, dtype: str, _: Path) -> None:
    file.create_dataset(name, shape, dtype, external=[("/etc/passwd", 0, 4096)])


def virtual(file: Any, name: str, shape: Any, dtype: str, folder: Path) -> None:
    external_link(file, "link", shape, dtype, folder)
    layout = h5py.VirtualLayout(shape, dtype)
    layout[:] = h5py.VirtualSource(str(folder / "other.h5"), "link", shape=shape)
    file.create_virtual_dataset(name, layout)


def soft_link_to_itself(file: Any, name: str, *_: Any) -> None:
    file[name] = h5py.SoftLink(f"/{name}")


def soft_link_to_nothing(file: Any, name: str, *_: Any) -> None:
    file[name] = h5py.SoftLink("/../../etc/passwd")


def huge_and_never_written(file: Any, name: str, shape: Any, dtype: str, _: Path) -> None:
    file.create_dataset(name, (1 << 40, shape[1]), dtype)


def huge_in_chunks(file: Any, name: str, shape: Any, dtype: str, _: Path) -> None:
    file.create_dataset(name, (1 << 44, shape[1]), dtype, chunks=(1, 1))


def zip_bomb(file: Any, name: str, shape: Any, dtype: str, _: Path) -> None:
    file.create_dataset(name, (1 << 24, shape[1]), dtype, chunks=(1 << 16, 1), compression="gzip")


def filter_that_is_a_library(file: Any, name: str, shape: Any, dtype: str, _: Path) -> None:
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plist.set_chunk(shape)
    plist.set_filter(32015, h5py.h5z.FLAG_OPTIONAL)  # another program's
    space = h5py.h5s.create_simple(shape)
    h5py.h5d.create(file.id, name.encode(), h5py.h5t.py_create(np.dtype(dtype)), space, plist)


def group(file: Any, name: str, *_: Any) -> None:
    file.create_group(name)


def single_value(file: Any, name: str, *_: Any) -> None:
    file[name] = np.float32(1)


def other_dimensions(file: Any, name: str, shape: Any, dtype: str, _: Path) -> None:
    file[name] = np.ones((shape[0], shape[1] + 1, 1), dtype)


def other_type(file: Any, name: str, shape: Any, *_: Any) -> None:
    file[name] = np.ones(shape, "int16")


def big_endian(file: Any, name: str, shape: Any, dtype: str, _: Path) -> None:
    file[name] = np.ones(shape, np.dtype(dtype).newbyteorder(">"))


def text(file: Any, name: str, shape: Any, *_: Any) -> None:
    file.create_dataset(name, shape, h5py.string_dtype())


def references(file: Any, name: str, shape: Any, *_: Any) -> None:
    file.create_dataset(name, shape, h5py.ref_dtype)


def type_elsewhere(file: Any, name: str, shape: Any, dtype: str, _: Path) -> None:
    file["type"] = np.dtype(dtype)
    file.create_dataset(name, shape, file["type"])


def nothing(*_: Any) -> None:
    """An HDF5 file without arrays."""


PLANTS: list[Plant] = [
    external_link,
    values_in_another_file,
    values_in_passwd,
    virtual,
    soft_link_to_itself,
    soft_link_to_nothing,
    huge_and_never_written,
    huge_in_chunks,
    zip_bomb,
    filter_that_is_a_library,
    group,
    single_value,
    other_dimensions,
    other_type,
    big_endian,
    text,
    references,
    type_elsewhere,
    nothing,
]


def read_embeddings(plant: Plant, folder: Path) -> None:
    block = folder / "blocks/0-2.hdf5"
    block.parent.mkdir()
    with h5py.File(block, "w") as file:
        plant(file, "data", (2, 4), "float32", folder)
    list(EmbeddingBlocks.find([str(block)], "embeddings").read(1000))


def read_database(plant: Plant, folder: Path) -> None:
    (folder / "merged").mkdir()
    (folder / "indexed_dataset_infos.json").write_text("[]")
    with h5py.File(folder / "merged/sampled.hdf5", "w") as file:
        plant(file, "chunks", (2, 5), "uint32", folder)
    ChunkDatabase(str(folder), kind="sampled").rows([0])


def read_a_block(plant: Plant, folder: Path) -> None:
    with h5py.File(folder / "block.hdf5", "w") as file:
        plant(file, "chunks_valid", (2, 4), "uint32", folder)
        file["chunks_invalid"] = np.ones((0, 4), np.uint32)
        file["doc_offsets"] = np.ones((2, 2), np.uint64)
    read_block(folder / "block.hdf5", "block")


@pytest.mark.few_cases(16)
@pytest.mark.parametrize("read", [read_embeddings, read_database, read_a_block])
@pytest.mark.parametrize("plant", PLANTS)
def test_an_hdf5_file_holds_its_array_or_is_refused(
    plant: Plant, read: Callable[[Plant, Path], None], tmp_path: Path
) -> None:
    (tmp_path / "secret").write_bytes(SECRET)
    with pytest.raises(ArtifactError):
        read(plant, tmp_path)


# --- documents and rows -------------------------------------------------------------------------

INFO = {
    **{"ratio": 1.0, "prefix": "en", "n_docs": 8, "n_docs_train": 6, "n_chunks": 20},
    **{"n_chunks_train": 15, "n_chunks_invalid": 1, "n_chunks_sampled": 5},
}

INFOS: list[Any] = [
    {},
    [{}],
    [[]],
    ["en"],
    None,
    [INFO | {"ratio": "1"}],
    [INFO | {"ratio": -1.0}],
    [INFO | {"ratio": True}],
    [INFO | {"prefix": 7}],
    [INFO | {"prefix": ["en"]}],
    [INFO | {"n_docs": -1}],
    [INFO | {"n_docs": 1.5}],
    [INFO | {"n_docs": 2**63}],
    [INFO | {"n_chunks": None}],
    [INFO | {"n_chunks_sampled": True}],
    [INFO | {"another": 1}],
]
TEXTS = ["", "[", "NaN", "[1e999]", "[" * 100_000, '{"a": 1' + "0" * 5000 + "}"]


@pytest.mark.parametrize("content", [*map(json.dumps, INFOS), *TEXTS], ids=lambda c: c[:40])
def test_a_list_of_datasets_is_one_or_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "indexed_dataset_infos.json").write_text(content)
    with pytest.raises(ArtifactError, match=r"indexed_dataset_infos\.json"):
        ChunkDatabase(str(tmp_path), kind="sampled")


ROWS = {
    "dataset": (7, 0, 0, 1, 1),
    "last dataset": (2**32 - 1, 0, 0, 1, 1),
    "document": (0, 8, 0, 1, 1),
    "last document": (0, 2**32 - 1, 0, 1, 1),
    "end of the document": (0, 0, 0, 2**32 - 1, 1),
    "tokens of the next document": (0, 0, 0, 4096, 1),
    "start after the end": (0, 0, 2, 1, 1),
    "start and end beyond": (0, 0, 2**32 - 2, 2**32 - 1, 1),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    folder = tmp_path_factory.mktemp("retro")
    prefixes = write_two(folder)
    build(folder, prefixes)
    return folder / "db", prefixes


@pytest.mark.parametrize("case", ROWS)
def test_a_chunk_lies_in_its_document_or_is_refused(
    case: str, made: tuple[Path, list[str]], tmp_path: Path
) -> None:
    folder, prefixes = made
    for name in ("indexed_dataset_infos.json", "merged/sampled.hdf5"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    with h5py.File(tmp_path / "merged/sampled.hdf5", "r+") as file:
        file["chunks"][1] = ROWS[case]
    database = ChunkDatabase(str(tmp_path), prefixes, "sampled")
    assert len(database.token_rows([0], 4, 0)) == 1
    with pytest.raises(ArtifactError, match=r"chunk 1 is tokens .* build the database again"):
        database.tokens(1)
    with pytest.raises(ArtifactError, match=r"chunk 1 is tokens .* build the database again"):
        database.token_rows([0, 1], 4, 0)


DESCRIPTION: dict[str, Any] = {
    **{"format_version": 1, "index_str": "Flat", "reason": "given", "dimensions": 16},
    **{"num_lists": 0, "code_bytes": 64, "num_training": 0, "num_vectors": 0, "nprobe": 1},
    "recall": None,
}
RECALL = {"neighbors": 5, "sample": 9, "seed": 1, "curve": [{"nprobe": 1, "recall": 0.5}]}

CHANGES: list[dict[str, Any]] = [
    {"format_version": 2},
    {"dimensions": "16"},
    {"dimensions": -1},
    {"code_bytes": [8]},
    {"code_bytes": True},
    {"num_vectors": 1.5},
    {"num_vectors": 2**64},
    {"index_str": 7},
    {"reason": None},
    {"recall": 1},
    {"recall": {}},
    {"recall": RECALL | {"curve": []}},
    {"recall": RECALL | {"curve": [{"nprobe": "1", "recall": 0.5}]}},
    {"recall": RECALL | {"curve": [{"nprobe": 1, "recall": float("nan")}]}},
    {"recall": RECALL | {"more": 1}},
    {"more": 1},
]


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_a_description_of_an_index_is_one_or_is_refused(change: dict[str, Any]) -> None:
    IndexDocument.from_document(DESCRIPTION | {"recall": RECALL}, "here")
    with pytest.raises(ArtifactError, match="here: does not describe an index"):
        IndexDocument.from_document(json.loads(json.dumps(DESCRIPTION | change)), "here")


# --- tables of neighbours, and projects -----------------------------------------------------------

TABLE: dict[str, Any] = {
    "samples": {
        **{"split": "train", "seq_length": 16, "chunk_length": 4, "num_samples": 1},
        **{"data": ["a"], "order": "b"},
    },
    **{"format_version": 1, "num_chunks": 4, "num_neighbors": 2, "database_digest": "d"},
    **{"index_digest": "e", "num_neighbors_query": 20, "nprobe": 4, "ef_search": 16},
    **{"mean_neighbors": 2.0, "share_fewer": 0.1, "share_none": 0},
    **{"evaluation_sets": ["f"], "evaluation_run": 32},
}

TABLE_CHANGES: list[dict[str, Any]] = [
    {"num_chunks": "4"},
    {"num_chunks": -4},
    {"num_chunks": 2**63},
    {"num_chunks": None},
    {"num_neighbors": 2.0},
    {"num_neighbors": True},
    {"mean_neighbors": float("nan")},
    {"database_digest": ["d"]},
    {"evaluation_sets": 7},
    {"samples": 7},
    {"samples": ["train"]},
    {"samples": {**TABLE["samples"], "seq_length": "16"}},
    {"samples": {**TABLE["samples"], "data": None}},
    {"more": 1},
]


@pytest.mark.parametrize("change", TABLE_CHANGES, ids=str)
def test_a_description_of_neighbours_is_one_or_is_refused(change: dict[str, Any]) -> None:
    NeighborsDocument.from_document(TABLE, "here")
    with pytest.raises(ArtifactError, match="here: does not describe a table of neighbours"):
        NeighborsDocument.from_document(json.loads(json.dumps(TABLE | change)), "here")


@pytest.mark.parametrize("rows", [0, 3, 5])
def test_a_block_of_neighbours_has_the_rows_of_its_name(rows: int, tmp_path: Path) -> None:
    (tmp_path / "neighbors.json").write_text(json.dumps(TABLE))
    ids = np.zeros((rows, 2), np.int64)
    write_block(tmp_path / block_name(0, 4, 4), ids, ids.astype(np.float32))
    with pytest.raises(ArtifactError, match=rf"{rows} rows of neighbors, wanted 4"):
        Neighbors(str(tmp_path)).rows([3])


PROJECT: dict[str, Any] = {
    **{"retro_gpt_data_path": ["a"], "retro_gpt_tokenizer_type": "ByteLevelTokenizer"},
    **{"retro_gpt_train_samples": 8, "retro_gpt_eval_interval": 4, "retro_gpt_eval_iters": 1},
    **{"retro_gpt_seq_length": 16, "retro_gpt_global_batch_size": 2},
    **{"retro_bert_tokenizer_type": "BertWordPieceCase", "retro_bert_vocab_file": "v"},
}
URL = "https://user:hunter2@127.0.0.1:1/a"


@pytest.mark.parametrize(
    "change",
    [
        {"retro_gpt_data_path": [URL]},
        {"retro_gpt_data_path": f"1 {URL} 1 b"},
        {"retro_gpt_data_path": [{URL: 1}]},
        {"retro_bert_vocab_file": URL},
        {"retro_gpt_merge_file": "s3://key:hunter2/x@h/v"},
        {"retro_neighbor_dirs": {"train": URL}},
        {"retro_neighbor_dirs": {URL: "x"}},
        {"retro_index_nprobe": 1, "retro_query_nprobe": URL},
        {URL: 1},
    ],
    ids=str,
)
def test_a_project_with_a_password_is_refused_and_not_quoted(
    change: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PROJECT))
    read_project(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(PROJECT | change))
    with pytest.raises(
        ConfigError, match=r"config\.json has a URL with a user or a pass"
    ) as caught:
        read_project(str(tmp_path))
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("text", STEERING)
def test_what_is_explored_steers_no_terminal(text: str) -> None:
    for said in (shown(text), shown({"text": [text]})):
        assert text not in said
        assert said.isprintable()
