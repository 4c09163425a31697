"""Neighbours of training samples: the nearest chunks of other documents, and no others."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("faiss")

from stages.faiss_add.config import FaissAddConfig
from stages.faiss_add.run import run as run_add
from stages.faiss_query import table as table_module
from stages.faiss_query.config import FaissQueryConfig
from stages.faiss_query.run import run as run_query
from stages.faiss_train.config import FaissTrainConfig
from stages.faiss_train.run import run as run_train
from stages.runtime.cli import stage_main
from tests.stages.directly import Done, run_directly, run_program
from tests.stages.full_disk import fill_disk
from tests.trainyard.retrieval.corpora import LENGTH, write_corpus
from tests.trainyard.retrieval.embedded import write_blocks
from tests.trainyard.retrieval.samples import Yard, make_yard, sentences
from trainyard.artifacts import store
from trainyard.artifacts.digest import digest_files
from trainyard.artifacts.manifest import read_manifest
from trainyard.errors import ArtifactError, ConfigError, DataError
from trainyard.retrieval import index as faiss_index
from trainyard.retrieval.examples import EXAMPLES, chosen_chunks
from trainyard.retrieval.neighbors import Neighbors
from trainyard.retrieval.pretraining_chunks import as_document

K = 5


def flip(path: Path, share: float = 0.6) -> None:
    data = bytearray(path.read_bytes())
    data[int(len(data) * share)] ^= 1
    path.write_bytes(data)


@pytest.fixture(scope="module")
def yard(tmp_path_factory: pytest.TempPathFactory) -> Yard:
    yard = make_yard(tmp_path_factory.mktemp("yard"))
    at, options = yard.folder, {"embeddings": str(yard.folder / "embeddings-db")}
    run_directly(FaissTrainConfig, run_train, output_dir=str(at / "empty"), **options)
    run_directly(
        FaissAddConfig,
        run_add,
        index=str(at / "empty"),
        embeddings=[options["embeddings"]],
        output_dir=str(at / "index"),
    )
    return yard


def options_of(yard: Yard, **more: Any) -> dict[str, Any]:
    given = {
        "index": str(yard.folder / "index"),
        "embeddings": str(yard.folder / "embeddings-train"),
        "retro_db": str(yard.folder / "db"),
        "retro_gpt_chunk_length": LENGTH,
        "retro_query_num_neighbors_query": 40,
        "retro_query_num_neighbors_save": K,
        "retro_block_size": 30,
        **yard.options,
    }
    return {**given, **more}


def query(yard: Yard, into: Path | str, **more: Any) -> dict[str, Any]:
    return run_directly(
        FaissQueryConfig, run_query, output_dir=str(into), **options_of(yard, **more)
    )


def words_of(yard: Yard, **more: Any) -> list[str]:
    """The options as a command line."""
    words = []
    for name, value in options_of(yard, **more).items():
        values = value if isinstance(value, list) else [value]
        words += [f"--{name.replace('_', '-')}", *map(str, values)]
    return words


def by_hand(yard: Yard, num_found: int) -> NDArray[np.int64]:
    """The table, one chunk at a time."""
    chunks, database = yard.chunks(), yard.database()
    vectors, theirs = yard.vectors(), yard.database_vectors().astype(np.float64)
    documents = chunks.documents(0, chunks.num_samples).tolist()
    table = np.full((len(chunks), K), -1)
    for chunk, vector in enumerate(vectors.astype(np.float64)):
        own = {(d, n) for sample, d, n in documents if sample == chunk // chunks.chunks_per_sample}
        nearest = np.argsort(((theirs - vector) ** 2).sum(axis=1), kind="stable")[:num_found]
        pairs = map(tuple, database.rows(nearest)[:, :2].tolist())
        kept = [i for i, pair in zip(nearest, pairs, strict=True) if pair not in own][:K]
        table[chunk, : len(kept)] = kept
    return table


def lengths(yard: Yard, table: NDArray[np.int64]) -> NDArray[np.float64]:
    """Squared distances of the neighbours; infinity for -1."""
    theirs = yard.database_vectors().astype(np.float64)
    ours = yard.vectors().astype(np.float64)
    found = ((theirs[table] - ours[:, None]) ** 2).sum(axis=2)
    return np.where(table < 0, np.inf, found)


@pytest.mark.slow
@pytest.mark.parametrize("num_found", [6, 40])
def test_neighbors_are_the_nearest_chunks_of_other_documents(
    yard: Yard, tmp_path: Path, num_found: int
) -> None:
    metrics = query(yard, tmp_path / "out", retro_query_num_neighbors_query=num_found)
    table = Neighbors(str(tmp_path / "out"))
    found, expected = table.rows(np.arange(len(table))), by_hand(yard, num_found)
    # Chunks of the same letters are as near; so distances are compared, not numbers.
    np.testing.assert_allclose(lengths(yard, found), lengths(yard, expected), atol=1e-3)
    np.testing.assert_allclose(
        table.distances(np.arange(len(table))), lengths(yard, found), rtol=1e-4, atol=1e-3
    )
    assert metrics["chunks"] == len(table) == len(yard.chunks())
    assert metrics["mean_neighbors"] == pytest.approx((found >= 0).sum(axis=1).mean(), abs=1e-5)
    assert metrics["share_fewer"] == pytest.approx((found[:, -1] < 0).mean(), abs=1e-5)
    assert 0 < metrics["share_own"] < 1
    if num_found == 6:
        assert metrics["share_fewer"] > 0


@pytest.mark.slow
def test_the_files_are_those_of_megatron(yard: Yard, tmp_path: Path) -> None:
    query(yard, tmp_path)
    count = len(yard.chunks())
    assert count == 24 * 4
    names = sorted(path.name for path in tmp_path.glob("*.hdf5"))
    assert names == ["000-030.hdf5", "030-060.hdf5", "060-090.hdf5", "090-096.hdf5"]
    with h5py.File(tmp_path / names[-1], "r") as file:
        assert file["neighbors"].dtype == np.int64
        assert file["neighbors"].shape == file["distances"].shape == (6, K)
    document = json.loads((tmp_path / "neighbors.json").read_text())
    assert (document["num_chunks"], document["num_neighbors"]) == (count, K)


@pytest.mark.slow
def test_the_table_does_not_depend_on_the_size_of_blocks(
    yard: Yard, tmp_path: Path, store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINYARD_CACHE", str(tmp_path / "cache"))
    query(yard, f"{store_url}/small")
    query(yard, f"{store_url}/large", retro_block_size=1000)
    small, large = (Neighbors(f"{store_url}/{name}") for name in ("small", "large"))
    numbers = np.random.default_rng(0).permutation(len(small)).reshape(4, -1)
    np.testing.assert_array_equal(small.rows(numbers), large.rows(numbers))
    assert small.document == large.document


@pytest.mark.slow
def test_blocks_of_a_killed_run_are_used(
    yard: Yard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = query(yard, tmp_path / "whole")
    calls: list[int] = []

    def search(index: Any, vectors: Any, *more: Any) -> Any:
        calls.append(len(vectors))
        if len(calls) == 6:  # after a warm-up, an estimate and two blocks, one in two pieces
            raise KeyboardInterrupt
        return original(index, vectors, *more)

    original = faiss_index.search
    monkeypatch.setattr(faiss_index, "search", search)
    with pytest.raises(KeyboardInterrupt):
        query(yard, tmp_path / "out")
    calls[:] = [0] * 6
    again = query(yard, tmp_path / "out")
    assert calls[6:] == [8, 96, 14, 16, 6]
    for path in (tmp_path / "whole").iterdir():
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()
    again.pop("milliseconds_per_query")
    assert again.items() <= whole.items()


@pytest.mark.slow
def test_joined_shares_are_the_table_of_one_run(yard: Yard, store_url: str, tmp_path: Path) -> None:
    into, count = f"{store_url}/out", ["--world-size", "3"]
    words = words_of(yard)

    def run(*more: str) -> Done:
        return run_program("stages.faiss_query", *words, *more)

    assert run("--output-dir", str(tmp_path / "whole")).status == 0
    missing = run("--output-dir", into, *count)
    assert missing.status == 1
    assert "of 3 shares, those of rank 0, 1, 2 are not made yet" in missing.err
    for rank in (2, 0, 1):
        assert run("--output-dir", into, *count, "--rank", str(rank)).status == 0
    assert run("--output-dir", into, *count).status == 0
    whole, joined = (read_manifest(f"{at}/manifest.json") for at in (str(tmp_path / "whole"), into))
    assert whole is not None
    assert joined is not None
    assert joined[0].files == whole[0].files
    kinds = ("mean_neighbors", "share_fewer", "share_none", "share_own", "chunks")
    assert [joined[0].metrics[k] for k in kinds] == [whole[0].metrics[k] for k in kinds]
    assert not [name for name in store.list_files(store_url) if "shares" in name]


@pytest.mark.slow
def test_examples_are_chunks_of_the_table_with_their_neighbors_and_sources(
    yard: Yard, tmp_path: Path
) -> None:
    query(yard, tmp_path)
    table, chunks, database = Neighbors(str(tmp_path)), yard.chunks(), yard.database()
    document = json.loads((tmp_path / EXAMPLES).read_text())
    found = document["examples"]
    numbers = [one["sample"] * chunks.chunks_per_sample + one["chunk"] for one in found]
    assert numbers == chosen_chunks(len(table))
    for number, one in zip(numbers, found, strict=True):
        assert one["tokens"] == chunks.token_rows(number, number + 1)[0].tolist()
        ids = [neighbor["chunk"] for neighbor in one["neighbors"]]
        assert ids == table.rows(number)[: len(ids)].tolist()
        assert len(ids) == 3
        for chunk, neighbor in zip(ids, one["neighbors"], strict=True):
            dataset, document_number = database.rows(chunk)[:2].tolist()
            assert neighbor["tokens"] == database.tokens(chunk).tolist()
            assert (neighbor["dataset"], neighbor["document"]) == (
                database.infos[dataset].prefix,
                document_number,
            )
            after = int(database.continuations(chunk))
            assert neighbor["continuation"] == (
                [] if after < 0 else database.tokens(after).tolist()
            )


@pytest.mark.slow
def test_validation_samples_have_neighbors_too(yard: Yard, tmp_path: Path) -> None:
    at = str(yard.folder / "embeddings-valid")
    metrics = query(yard, tmp_path, retro_query_split="valid", embeddings=at)
    assert metrics["share_own"] == 0, "their documents are in no database"
    assert metrics["mean_neighbors"] == K


@pytest.mark.slow
def test_what_repeats_an_evaluation_set_is_no_neighbor(yard: Yard, tmp_path: Path) -> None:
    held_out = write_corpus(tmp_path / "held", ["xxx" + sentences(60, 0)[7] + "yyy"])
    plain = query(yard, tmp_path / "plain")
    metrics = query(
        yard, tmp_path / "out", retro_exclude_evaluation=[held_out], retro_exclude_run=LENGTH - 1
    )
    assert plain["excluded_chunks"] == 0 < metrics["excluded_chunks"]
    database, table = yard.database(), Neighbors(str(tmp_path / "out"))
    text = (tmp_path / "held.bin").read_bytes()[::2]
    for number in range(len(database)):
        chunk = bytes(database.tokens(number).tolist())
        if chunk in text and len(chunk) >= LENGTH - 1:
            assert number not in table.rows(np.arange(len(table)))
    assert metrics["share_evaluation"] > 0


@pytest.mark.slow
def test_a_leak_is_found_before_the_table_is_published(
    yard: Yard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks = yard.chunks()
    documents = chunks.documents(0, 1)
    rows = yard.database().chunks[:, :2]
    own = next(
        np.flatnonzero((rows == pair).all(axis=1))[0]
        for pair in documents[:, 1:]
        if (rows == pair).all(axis=1).any()
    )
    write = table_module.write_block

    def leaking(path: Path, ids: Any, distances: Any) -> None:
        ids[2, 0] = own
        write(path, ids, distances)

    monkeypatch.setattr(table_module, "write_block", leaking)
    with pytest.raises(DataError, match=f"leak test: neighbour {own} of chunk 2 is of a document"):
        query(yard, tmp_path)
    assert not (tmp_path / "neighbors.json").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"seed": 1, "train_iters": 7}, "holds 96 vectors, and the train samples .* have 112"),
        ({"retro_query_num_neighbors_save": 50}, r"-save \(50\) must be at most .* \(40\)"),
        ({"retro_gpt_chunk_length": 4}, "holds 96 vectors|have 8 tokens; give that"),
        ({"retro_gpt_chunk_length": 5}, r"--seq-length \(32\) must be divisible by"),
        ({"mock_data": True, "data_path": []}, "--mock-data has no documents"),
        ({"retro_query_gpus": "all", "retro_task_validate": 1.0}, "-gpus is not validated"),
    ],
)
def test_mistakes_are_refused(
    yard: Yard, tmp_path: Path, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        query(yard, tmp_path, **options)


@pytest.mark.slow
def test_embeddings_of_samples_in_another_order_are_refused(yard: Yard, tmp_path: Path) -> None:
    shutil.copytree(yard.folder / "embeddings-train", tmp_path / "embeddings")
    path = tmp_path / "embeddings/samples.json"
    path.write_text(json.dumps(as_document(yard.chunks().identity())))
    query(yard, tmp_path / "out", embeddings=str(tmp_path / "embeddings"))
    with pytest.raises(ConfigError, match=r"of other samples .*another order: the seed"):
        query(yard, tmp_path / "other", embeddings=str(tmp_path / "embeddings"), seed=3)
    path.write_text("{}")
    with pytest.raises(ArtifactError, match="does not describe samples"):
        query(yard, tmp_path / "other", embeddings=str(tmp_path / "embeddings"))


@pytest.mark.slow
def test_a_table_that_fills_the_disk_is_refused(
    yard: Yard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill_disk(monkeypatch)
    with pytest.raises(ConfigError, match=r"neighbours of .* chunks take .* of disk, .*-num-neigh"):
        query(yard, tmp_path / "out")


def test_inputs_that_were_not_made_for_each_other_are_refused(yard: Yard, tmp_path: Path) -> None:
    write_blocks(tmp_path / "wide", np.zeros((96, 3), np.float32), 96)
    with pytest.raises(ConfigError, match="of 3 dimensions, and the index has 16"):
        query(yard, tmp_path / "out", embeddings=str(tmp_path / "wide"))
    other = make_yard(tmp_path, ("fr",), 30)
    with pytest.raises(ConfigError, match=r"vectors, and --retro-db .* chunks; give the index"):
        query(yard, tmp_path / "out", retro_db=str(other.folder / "db"))


@pytest.mark.slow
def test_a_flipped_bit_of_the_index_is_refused(
    yard: Yard, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    filled, out = tmp_path / "index", tmp_path / "out"
    made = ("--index", str(yard.folder / "empty"), "--output-dir", str(filled))
    of_chunks = ("--embeddings", str(yard.folder / "embeddings-db"))
    add = stage_main("faiss_add", FaissAddConfig, "stages.faiss_add.run", argv=[*made, *of_chunks])
    assert add == 0
    flip(filled / "added.faissindex")
    argv = words_of(yard, index=str(filled), output_dir=str(out))
    assert stage_main("faiss_query", FaissQueryConfig, "stages.faiss_query.run", argv=argv) == 1
    said = capsys.readouterr().err
    assert "added.faissindex: " in said
    assert "damaged" in said
    assert "Traceback" not in said
    assert not (out / "manifest.json").exists()


def test_token_files_of_the_name_of_a_dataset_and_other_contents_are_refused(
    yard: Yard, tmp_path: Path
) -> None:
    for suffix in ("bin", "idx"):
        shutil.copy(yard.folder / f"de.{suffix}", tmp_path / f"de.{suffix}")
    (tmp_path / "other").mkdir()
    changed = write_corpus(tmp_path / "other/en", sentences(59, 9))
    blend = ["1", changed, "1", str(tmp_path / "de")]
    with pytest.raises(ConfigError, match=r"other/en is not what .* though dataset 0"):
        query(yard, tmp_path / "out", data_path=blend)


@pytest.mark.slow
def test_validation_finds_other_neighbors(
    yard: Yard, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = words_of(yard, output_dir=tmp_path / "out")

    def run(expect: int, *more: str) -> str:
        argv = [*words, *more]
        done = stage_main("faiss_query", FaissQueryConfig, "stages.faiss_query.run", argv=argv)
        assert done == expect
        return "".join(capsys.readouterr())

    run(0)
    assert "1 of 4 blocks searched again, 6 chunks" in run(0, "--retro-task-validate", "0.1")
    other = ("--retro-query-nprobe", "1", "--retro-task-validate", "1")
    assert "was made with None; give the options" in run(2, *other)
    path = sorted((tmp_path / "out").glob("*.hdf5"))[1]
    with h5py.File(path, "r+") as file:
        file["neighbors"][3] = file["neighbors"][4]
    assert path.name in run(1, "--retro-task-validate", "1"), "not what the manifest lists"
    listed = json.loads((tmp_path / "out/manifest.json").read_text())
    listed["files"] = [f for f in listed["files"] if f["path"] != path.name]
    listed["output_digest"] = digest_files(
        (f["path"], f["size_bytes"], f["digest"]) for f in listed["files"]
    )
    (tmp_path / "out/manifest.json").write_text(json.dumps(listed))
    assert "chunk 33 has other neighbours" in run(1, "--retro-task-validate", "1")
