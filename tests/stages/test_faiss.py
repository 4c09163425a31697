"""An index from embeddings: trained, filled, its recall measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("faiss")

from stages.faiss_add.config import FaissAddConfig
from stages.faiss_add.fill import PROBE_ROWS
from stages.faiss_add.run import run as run_add
from stages.faiss_train.config import FaissTrainConfig
from stages.faiss_train.run import run as run_train
from tests.stages.directly import run_directly
from tests.stages.full_disk import fill_disk
from tests.trainyard.retrieval.embedded import clustered, write_blocks
from trainyard.errors import ConfigError, DataError
from trainyard.retrieval import index as faiss_index
from trainyard.retrieval.recall import measure_recall, sample_ids

VECTORS = clustered(4000, 16)


@pytest.fixture(scope="module")
def embeddings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("embeddings")
    write_blocks(folder, VECTORS, 1000)
    return folder


def train(embeddings: Path, into: Path, **options: Any) -> dict[str, Any]:
    given = {"retro_index_str": "IVF32,SQ8", **options}
    return run_directly(
        FaissTrainConfig, run_train, embeddings=str(embeddings), output_dir=str(into), **given
    )


def add(index: Path, embeddings: Path, into: Path, **options: Any) -> dict[str, Any]:
    given = {"recall_sample": 100, "retro_query_num_neighbors_save": 5, **options}
    return run_directly(
        FaissAddConfig,
        run_add,
        index=str(index),
        embeddings=[str(embeddings)],
        output_dir=str(into),
        **given,
    )


def document(folder: Path) -> Any:
    return json.loads((folder / "index.json").read_text())


@pytest.mark.slow
def test_a_filled_index_has_every_vector_under_its_id_and_the_recall_it_says(
    embeddings: Path, tmp_path: Path
) -> None:
    train(embeddings, tmp_path / "empty")
    metrics = add(tmp_path / "empty", embeddings, tmp_path / "full")
    index = faiss_index.read(tmp_path / "full/added.faissindex")
    _, ids = faiss_index.search(index, VECTORS, 1, nprobe=32, ef_search=1)
    assert (ids[:, 0] == np.arange(4000)).mean() > 0.99

    found = document(tmp_path / "full")
    assert found["num_vectors"] == metrics["vectors"] == 4000
    recalls = {one["nprobe"]: one["recall"] for one in found["recall"]["curve"]}
    assert list(recalls) == [1, 4, 16, 32]
    assert recalls[32] > 0.95
    assert found["nprobe"] == min(n for n, recall in recalls.items() if recall >= 0.95)
    sample = sample_ids(4000, 100, 1234)
    _, found = faiss_index.search(index, VECTORS[sample], 6, nprobe=4, ef_search=1)
    others = np.array([row[row != i][:5] for row, i in zip(found, sample, strict=True)])
    again = measure_recall(VECTORS[sample], sample, others[None], [(0, VECTORS)])
    assert again == pytest.approx([recalls[4]], abs=1e-6)


@pytest.mark.slow
def test_the_kind_of_large_databases_is_filled_and_searched(
    embeddings: Path, tmp_path: Path
) -> None:
    """A rotation, a graph over the lists, product codes: that of guides, and auto's beyond 8 GB.

    The index finds what faiss's own, trained alike and filled at once, finds."""
    kind = "OPQ8_16,IVF16_HNSW8,PQ8"
    train(embeddings, tmp_path / "empty", retro_index_str=kind)
    add(tmp_path / "empty", embeddings, tmp_path / "full", retro_query_num_neighbors_save=20)
    recall = {
        one["nprobe"]: one["recall"] for one in document(tmp_path / "full")["recall"]["curve"]
    }
    assert recall[16] > 0.7
    index = faiss_index.read(tmp_path / "full/added.faissindex")
    plain = faiss_index.read(tmp_path / "empty/empty.faissindex")
    plain.add(VECTORS)
    for nprobe in (1, 16):
        ours, theirs = (faiss_index.search(one, VECTORS, 10, nprobe, 16) for one in (index, plain))
        np.testing.assert_array_equal(ours[0], theirs[0])
        assert (ours[1] == theirs[1]).mean() > 0.99, "but for equal distances"
    _, nearest = faiss_index.search(index, VECTORS, 20, 16, 16)
    assert (nearest == np.arange(4000)[:, None]).any(axis=1).mean() > 0.95


def test_the_sample_to_train_on_is_spread_and_seeded(embeddings: Path, tmp_path: Path) -> None:
    bytes_of = {}
    for name, options in {
        "a": {"retro_index_ntrain": 1300},
        "b": {"retro_index_ntrain": 1300},
        "other": {"retro_index_ntrain": 1300, "seed": 1},
    }.items():
        assert train(embeddings, tmp_path / name, **options)["training_vectors"] == 1300
        bytes_of[name] = (tmp_path / name / "empty.faissindex").read_bytes()
    assert bytes_of["a"] == bytes_of["b"] != bytes_of["other"]


def test_auto_chooses_by_the_number_of_vectors_to_come(embeddings: Path, tmp_path: Path) -> None:
    train(embeddings, tmp_path / "small", retro_index_str="auto")
    assert document(tmp_path / "small")["index_str"] == "Flat"
    train(embeddings, tmp_path / "large", retro_index_str="auto", index_size=100_000)
    found = document(tmp_path / "large")
    assert found["index_str"] == "IVF64,SQ8"
    assert "4,000 training vectors suffice for no more" in found["reason"]


@pytest.mark.slow
def test_an_index_that_finds_too_little_is_not_published(embeddings: Path, tmp_path: Path) -> None:
    train(embeddings, tmp_path / "empty", retro_index_str="PQ2x4")
    with pytest.raises(DataError, match=r"recall@5 of PQ2x4 is 0.\d+ .*--retro-min-recall 0.9"):
        add(tmp_path / "empty", embeddings, tmp_path / "full", retro_min_recall=0.9)
    assert not (tmp_path / "full/added.faissindex").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"retro_index_str": "IVF1024,SQ8"},
            "IVF1024,SQ8 needs 39,936 training vectors .* there are 4,000; .* at most 102 lists",
        ),
        ({"retro_index_ntrain": 5000}, "--retro-index-ntrain 5,000: there are 4,000 embeddings"),
        ({"retro_index_ntrain": 100}, "needs 1,248 training vectors .* there are 100"),
        ({"retro_index_str": "IVF32,Nothing"}, "--retro-index-str 'IVF32,Nothing'"),
        ({"retro_index_train_load_fraction": 1.5}, "above 0 and at most 1, got 1.5"),
        ({"index_size": 2**62}, "--index-size must be at most 1099511627776, got 4611"),
    ],
)
def test_what_cannot_be_trained_is_refused(
    embeddings: Path, tmp_path: Path, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        train(embeddings, tmp_path / "out", **options)


def test_embeddings_of_another_model_are_refused(embeddings: Path, tmp_path: Path) -> None:
    train(embeddings, tmp_path / "empty")
    write_blocks(tmp_path / "other", clustered(100, 8), 100)
    with pytest.raises(ConfigError, match="of 8 dimensions, and the index was trained on 16"):
        add(tmp_path / "empty", tmp_path / "other", tmp_path / "full")


@pytest.mark.slow
def test_an_index_that_fills_the_disk_is_refused(
    embeddings: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(embeddings, tmp_path / "empty")
    fill_disk(monkeypatch)
    with pytest.raises(ConfigError, match=r"an index of 4,000 vectors and .* shorter codes"):
        add(tmp_path / "empty", embeddings, tmp_path / "full")
    assert not (tmp_path / "full/added.faissindex").exists()


@pytest.mark.slow
def test_codes_of_a_killed_run_are_used(
    embeddings: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(embeddings, tmp_path / "empty")
    add(tmp_path / "empty", embeddings, tmp_path / "whole")
    calls = []

    def encode(index: Any, vectors: Any) -> Any:
        calls.append(len(vectors))
        if len(calls) == 4:  # the first one is of a few vectors, to estimate the time
            raise KeyboardInterrupt
        return original(index, vectors)

    original = faiss_index.encode
    monkeypatch.setattr(faiss_index, "encode", encode)
    with pytest.raises(KeyboardInterrupt):
        add(tmp_path / "empty", embeddings, tmp_path / "full")
    add(tmp_path / "empty", embeddings, tmp_path / "full")
    of_blocks = [count for count in calls if count != PROBE_ROWS]
    assert sum(of_blocks) == 5000, "two blocks, the one that was cut off, then it and the last"
    for name in ("added.faissindex", "index.json"):
        assert (tmp_path / "full" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
