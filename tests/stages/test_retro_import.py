"""Projects of Megatron-LM: written, read back, and refused where they cannot be right."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("faiss")

import faiss

from stages.faiss_query.config import FaissQueryConfig
from stages.faiss_query.run import run as run_query
from stages.retro_export.config import RetroExportConfig
from stages.retro_export.run import run as run_export
from stages.retro_import.config import RetroImportConfig
from stages.retro_import.run import run as run_import
from tests.stages.directly import run_directly
from tests.trainyard.retrieval.corpora import LENGTH, arrays
from tests.trainyard.retrieval.samples import SEQ_LENGTH, Yard, make_yard
from trainyard.corpus.indexed import IndexedDataset
from trainyard.errors import ArtifactError, ConfigError, DataError
from trainyard.retrieval import index as faiss_index
from trainyard.retrieval.database_sources import find_datasets
from trainyard.retrieval.leak_test import check_neighbors
from trainyard.retrieval.retro import Retro

INDEX_STR = "IVF8,SQ8"
K = 4


@dataclass(frozen=True)
class OldProject:
    """A project as Megatron-LM leaves it, and what was put into it."""

    folder: Path
    yard: Yard
    neighbors: NDArray[np.int64]


def nearest(yard: Yard) -> NDArray[np.int64]:
    """(chunks, K) nearest chunks of other documents, found one by one."""
    chunks, database = yard.chunks(), yard.database()
    own = {tuple(row) for row in chunks.documents(0, chunks.num_samples).tolist()}
    gaps = ((yard.vectors()[:, None] - yard.database_vectors()[None]) ** 2).sum(axis=2)
    rows = database.chunks[:, :2].tolist()
    table = np.full((len(gaps), K), -1)
    for number, gap in enumerate(gaps):
        sample = number // chunks.chunks_per_sample
        allowed = [c for c in np.argsort(gap) if (sample, *rows[c]) not in own]
        table[number] = allowed[:K]
    table[5, 2:] = -1  # as if the search had found fewer
    return table


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> OldProject:
    """Laid out as by Megatron-LM's tools: names, types, options; blocks by h5py's defaults."""
    folder = tmp_path_factory.mktemp("old")
    yard = make_yard(tmp_path_factory.mktemp("yard"))
    shutil.copytree(yard.folder / "db", folder / "db")
    shutil.copy(yard.folder / "vocab.txt", folder)
    for name in ("en", "de"):
        (folder / "data/wiki").mkdir(parents=True, exist_ok=True)
        for ending in (".bin", ".idx"):
            shutil.copy(yard.folder / f"{name}{ending}", folder / f"data/wiki/{name}{ending}")
    infos = json.loads((folder / "db/indexed_dataset_infos.json").read_text())
    for info in infos:  # a dataset is called by its path below data/
        (folder / "db/individual/wiki").mkdir(exist_ok=True)
        (folder / "db/individual" / info["prefix"]).rename(
            folder / "db/individual/wiki" / info["prefix"]
        )
        info["prefix"] = f"wiki/{info['prefix']}"
    (folder / "db/indexed_dataset_infos.json").write_text(json.dumps(infos, indent=4))
    for path in folder.glob("db/**/*.hdf5"):
        held = arrays(path)
        with h5py.File(path, "w") as file:
            for name, values in held.items():
                kind = "uint32" if "chunks" in name else "uint64"
                empty = name == "chunks_invalid" and not len(values)
                file.create_dataset(name, data=(values[:, 0] if empty else values).astype(kind))
    vectors = yard.database_vectors()
    index = faiss.index_factory(vectors.shape[1], INDEX_STR)
    index.train(vectors)
    place = folder / "index/faiss-par-add" / INDEX_STR
    place.mkdir(parents=True)
    faiss.write_index(index, str(place / "empty_0.970.faissindex"))
    index.add(vectors)
    faiss.write_index(index, str(place / "added_0.970_1.000.faissindex"))
    table = nearest(yard)
    (folder / "query/train_0af3").mkdir(parents=True)
    for start in range(0, len(table), 50):
        stop = min(start + 50, len(table))
        with h5py.File(folder / f"query/train_0af3/{start:04d}-{stop:04d}.hdf5", "w") as file:
            file.create_dataset("neighbors", data=table[start:stop])
    config = {
        "retro_gpt_seed": 1234,
        "retro_gpt_data_path": ["1", "wiki/en", "1", "wiki/de"],
        "retro_gpt_data_cache_path": None,
        "retro_gpt_split": yard.options["split"],
        "retro_gpt_train_samples": 24,
        "retro_gpt_eval_interval": 1000,
        "retro_gpt_eval_iters": 1,
        "retro_gpt_tokenizer_type": "ByteLevelTokenizer",
        "retro_gpt_tokenizer_model": None,
        "retro_gpt_vocab_file": None,
        "retro_gpt_merge_file": None,
        "retro_gpt_seq_length": SEQ_LENGTH,
        "retro_gpt_global_batch_size": 4,
        "retro_gpt_chunk_length": LENGTH,
        "retro_block_size": 50,
        "retro_bert_tokenizer_type": "BertWordPieceLowerCase",
        "retro_bert_vocab_file": "vocab.txt",
        "retro_neighbor_dirs": {"train": "train_0af3", "valid": None, "test": None},
    }
    (folder / "config.json").write_text(json.dumps(config, indent=4))
    return OldProject(folder, yard, table)


def import_(old: Path, into: Path, **more: Any) -> dict[str, Any]:
    return run_directly(
        RetroImportConfig,
        run_import,
        retro_project_dir=str(old),
        output_dir=str(into),
        **more,
    )


def export(project: Path, into: Path, **more: Any) -> dict[str, Any]:
    return run_directly(
        RetroExportConfig,
        run_export,
        retro_project_dir=str(project),
        output_dir=str(into),
        **more,
    )


@pytest.fixture(scope="module")
def imported(old: OldProject, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("new") / "project"
    import_(old.folder, folder)
    return folder


def answers(file: Path, vectors: NDArray[np.float32]) -> list[Any]:
    index = faiss_index.read(file)
    found = faiss_index.search(index, vectors, 10, nprobe=3, ef_search=16)
    return [part.tolist() for part in found]


@pytest.mark.slow
def test_an_old_project_is_read_with_its_database_index_and_neighbours(
    old: OldProject, imported: Path
) -> None:
    project, database = Retro.open(str(imported)), old.yard.database()
    assert project.get_db_num_chunks() == len(database)
    for chunk in (0, 9, len(database) - 1):
        assert project.get_db_chunk_gpt(chunk) == database.tokens(chunk).tolist()
    per_sample = SEQ_LENGTH // LENGTH
    for sample in (0, 1, 23):
        ids = project.get_pt_sample("train", sample)["neighbor_ids"]
        rows = old.neighbors[sample * per_sample : (sample + 1) * per_sample]
        assert ids.tolist() == rows[:, :2].tolist()
    vectors = old.yard.vectors()
    before = old.folder / "index/faiss-par-add" / INDEX_STR / "added_0.970_1.000.faissindex"
    assert answers(imported / "index/added.faissindex", vectors) == answers(before, vectors)
    document = json.loads((imported / "index/index.json").read_text())
    assert (document["index_str"], document["num_lists"]) == (INDEX_STR, 8)
    assert document["nprobe"] == 8, "65536 of Megatron-LM, and there are only so many"


@pytest.mark.slow
def test_an_imported_project_is_searched_as_any_other(
    old: OldProject, imported: Path, tmp_path: Path
) -> None:
    prefixes = [str(old.folder / "data/wiki" / name) for name in ("en", "de")]
    run_directly(
        FaissQueryConfig,
        run_query,
        index=str(imported / "index"),
        retro_db=str(imported / "db"),
        embeddings=str(old.yard.folder / "embeddings-train"),
        retro_gpt_chunk_length=LENGTH,
        retro_query_num_neighbors_query=40,
        output_dir=str(tmp_path / "table"),
        **{**old.yard.options, "data_path": ["1", prefixes[0], "1", prefixes[1]]},
    )
    chunks, database = old.yard.chunks(), old.yard.database()
    with h5py.File(next((tmp_path / "table").glob("*.hdf5"))) as file:
        found = file["neighbors"][()]
    assert (found[:, 0] == old.neighbors[:, 0]).mean() > 0.75, "some chunks are equal"
    pairs = find_datasets(str(imported / "db"), prefixes)
    assert pairs == [(0, 0), (1, 1)]
    check_neighbors(found, 0, chunks, database, pairs)


@pytest.mark.slow
def test_export_then_import_is_the_same_project(
    old: OldProject, imported: Path, tmp_path: Path
) -> None:
    export(imported, tmp_path / "out", copy_data=True)
    import_(tmp_path / "out", tmp_path / "again")
    for path in sorted(old.folder.glob("db/**/*.hdf5")):
        name = path.relative_to(old.folder)
        assert (tmp_path / "again" / name).read_bytes() == path.read_bytes()
    for name in ("index/added.faissindex", "index/index.json", "index_empty/empty.faissindex"):
        assert (tmp_path / "again" / name).read_bytes() == (imported / name).read_bytes()
    first, second = (Retro.open(str(at)) for at in (imported, tmp_path / "again"))
    assert first.get_pt_num_samples("train") == second.get_pt_num_samples("train") == 24
    for sample in range(24):
        one, two = (project.get_pt_sample("train", sample) for project in (first, second))
        assert one.keys() == two.keys()
        assert all(np.array_equal(one[key], two[key]) for key in one)


@pytest.mark.slow
def test_an_exported_project_is_laid_out_as_by_megatron(
    old: OldProject, imported: Path, tmp_path: Path
) -> None:
    export(imported, tmp_path, copy_data=True)
    config = json.loads((tmp_path / "config.json").read_text())
    before = json.loads((old.folder / "config.json").read_text())
    changed = {key for key in before if config[key] != before[key]}
    assert changed == {"retro_gpt_data_path", "retro_bert_vocab_file", "retro_neighbor_dirs"}
    assert config["retro_gpt_data_path"] == ["1.0", "wiki/en", "1.0", "wiki/de"]
    assert (tmp_path / config["retro_bert_vocab_file"]).exists()
    for name in ("en.bin", "de.idx"):
        copied = tmp_path / "data/wiki" / name
        assert copied.read_bytes() == (old.folder / "data/wiki" / name).read_bytes()
    place = tmp_path / "index/faiss-par-add" / INDEX_STR
    assert (place / "added_1.000_1.000.faissindex").exists()
    # Training with Megatron-LM reads row i % retro_block_size of the block of chunk i.
    blocks = sorted((tmp_path / "query" / config["retro_neighbor_dirs"]["train"]).glob("*.hdf5"))
    for start, path in zip(range(0, len(old.neighbors), 50), blocks, strict=True):
        with h5py.File(path) as file:
            assert np.array_equal(file["neighbors"], old.neighbors[start : start + 50])


@pytest.mark.slow
def test_the_files_of_guides_hold_the_same(old: OldProject, imported: Path, tmp_path: Path) -> None:
    embeddings = str(old.yard.folder / "embeddings-db")
    export(imported, tmp_path, layout="guides", name="wiki", embeddings=embeddings)
    with h5py.File(tmp_path / "wiki_bert_embeddings.h5") as file:
        assert np.array_equal(file["data"], old.yard.database_vectors())
    vectors = old.yard.vectors()
    assert answers(tmp_path / "wiki.index", vectors) == answers(
        imported / "index/added.faissindex", vectors
    )
    pair = IndexedDataset(str(tmp_path / "wiki_neighbors_text_document"))
    assert pair.num_documents == 24
    assert np.array_equal([pair.get(i) for i in range(len(pair))], old.neighbors)


@pytest.mark.slow
def test_embeddings_that_are_not_of_the_database_are_refused(
    old: OldProject, imported: Path, tmp_path: Path
) -> None:
    embeddings = str(old.yard.folder / "embeddings-valid")
    with pytest.raises(ConfigError, match=r"give those of --chunks train"):
        export(imported, tmp_path, layout="guides", embeddings=embeddings)
    with pytest.raises(ConfigError, match="--copy-data is for --layout project"):
        export(imported, tmp_path, layout="guides", copy_data=True)
    with pytest.raises(ConfigError, match="--embeddings is for --layout guides"):
        export(imported, tmp_path, embeddings=embeddings)
    with pytest.raises(ConfigError, match="the names of files begin with it"):
        export(imported, tmp_path, layout="guides", name="../wiki")


# --- what is refused --------------------------------------------------------------------------


def copied(old: OldProject, tmp_path: Path) -> Path:
    return Path(shutil.copytree(old.folder, tmp_path / "old"))


def change_config(folder: Path, **more: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | more))


def rewrite(path: Path, name: str, values: NDArray[Any]) -> None:
    with h5py.File(path, "r+") as file:
        del file[name]
        file.create_dataset(name, data=values)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "error", "words"),
    [
        ({"retro_gpt_seed": 5}, DataError, "of a document of the chunk's own sample.*config.json"),
        ({"retro_gpt_train_samples": 28}, ArtifactError, "do not hold the chunks 0 to 112"),
        ({"retro_gpt_data_path": ["1", "wiki/de", "1", "wiki/en"]}, ConfigError, "was cut from"),
        ({"retro_gpt_chunk_length": 4}, DataError, "no chunk of 1 to 4 tokens"),
    ],
)
def test_a_table_of_other_samples_is_refused(
    old: OldProject, tmp_path: Path, more: dict[str, Any], error: type[Exception], words: str
) -> None:
    folder = copied(old, tmp_path)
    change_config(folder, **more)
    with pytest.raises(error, match=words):
        import_(folder, tmp_path / "new")
    assert not list(tmp_path.glob("new/**/*.hdf5")), "all is checked before anything is copied"


@pytest.mark.slow
def test_a_damaged_database_is_refused(old: OldProject, tmp_path: Path) -> None:
    folder = copied(old, tmp_path)
    path = folder / "db/merged/train.hdf5"
    held = arrays(path)
    chunks = held["chunks"].astype("uint32")
    for values, words in (
        (chunks[[1, 0, *range(2, len(chunks))]], "does not come after the one before it"),
        (np.where(np.arange(5) == 1, 10**6, chunks), "is of a document that is not in this part"),
        (np.where(np.arange(5) == 3, chunks[:, 2:3], chunks), "is no chunk of 1 to 8 tokens"),
        (chunks[:-1], "chunks of the datasets, not"),
    ):
        rewrite(path, "chunks", values.astype("uint32"))
        with pytest.raises(DataError, match=words):
            import_(folder, tmp_path / "new")
    rewrite(path, "chunks", chunks)
    rewrite(path, "doc_offsets", held["doc_offsets"].astype("uint64") + np.uint64([0, 0, 1]))
    with pytest.raises(DataError, match="doc_offsets do not count the chunks"):
        import_(folder, tmp_path / "new")
    rewrite(path, "doc_offsets", held["doc_offsets"].astype("uint64"))
    next(folder.glob("db/individual/wiki/en/*.hdf5")).rename(
        folder / "db/individual/wiki/en/00-59.hdf5"
    )
    with pytest.raises(DataError, match="its blocks do not hold the documents 0 to 60"):
        import_(folder, tmp_path / "new")


@pytest.mark.slow
def test_an_index_of_another_database_is_refused(old: OldProject, tmp_path: Path) -> None:
    folder = copied(old, tmp_path)
    place = folder / "index/faiss-par-add" / INDEX_STR
    index = faiss.read_index(str(place / "empty_0.970.faissindex"))
    index.add(old.yard.database_vectors()[:-3])
    faiss.write_index(index, str(place / "added_0.970_0.950.faissindex"))
    several = r"several filled indices; choose one by --retro-index-file: .*0\.950.*1\.000"
    with pytest.raises(ConfigError, match=several):
        import_(folder, tmp_path / "new")
    name = f"faiss-par-add/{INDEX_STR}/added_0.970_0.950.faissindex"
    import_(folder, tmp_path / "new", retro_index_file=name)
    found = json.loads((tmp_path / "new/index/index.json").read_text())
    assert found["add_fraction"] == 0.95
    faiss.write_index(index, str(place / "added_0.970_1.000.faissindex"))
    with pytest.raises(ConfigError, match=r"vectors, and the database has .* chunks"):
        import_(folder, tmp_path / "no", retro_index_file=name.replace("0.950", "1.000"))


@pytest.mark.slow
def test_values_in_another_file_are_not_read(old: OldProject, tmp_path: Path) -> None:
    folder = copied(old, tmp_path)
    path = next(folder.glob("query/*/*.hdf5"))
    with h5py.File(path, "w") as file:
        file.create_dataset("neighbors", (50, K), "int64", external=[("/etc/passwd", 0, 1600)])
    with pytest.raises(ArtifactError, match="its values lie in another file"):
        import_(folder, tmp_path / "new")


@pytest.mark.slow
def test_moved_token_files_are_given(old: OldProject, tmp_path: Path) -> None:
    folder = copied(old, tmp_path)
    (tmp_path / "far").mkdir()
    (folder / "data/wiki").rename(tmp_path / "far/wiki")
    moved = [str(tmp_path / "far/wiki" / name) for name in ("en", "de")]
    import_(folder, tmp_path / "new", retro_gpt_data_path=moved)
    assert Retro.open(str(tmp_path / "new")).get_pt_num_samples("train") == 24
    with pytest.raises(ConfigError, match=r"names 1 prefixes, and .* has 2: wiki/en, wiki/de"):
        import_(folder, tmp_path / "no", retro_gpt_data_path=moved[:1])
