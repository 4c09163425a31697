"""Where searches run: on the CPU without GPUs, beyond what faiss's kernels take, and for an index
that they do not know. A stand-in has the GPU functions of faiss; its copies are on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("faiss")

import faiss

from stages.faiss_query import run
from stages.faiss_query.search import Search
from tests.trainyard.retrieval.embedded import clustered
from trainyard.retrieval import index as faiss_index
from trainyard.retrieval.index_gpus import MOST, copied, num_gpus
from trainyard.retrieval.shards import Shards

VECTORS = clustered(2000, 16)


@pytest.fixture
def index() -> Any:
    index = faiss_index.create(16, "IVF16,SQ8")
    faiss_index.train(index, VECTORS)
    faiss_index.add_codes(index, faiss_index.encode(index, VECTORS))
    return index


def with_gpus(monkeypatch: pytest.MonkeyPatch, clone: Callable[..., Any]) -> None:
    monkeypatch.setattr(faiss, "StandardGpuResources", object, raising=False)
    monkeypatch.setattr(faiss, "get_num_gpus", lambda: 2)
    monkeypatch.setattr(faiss, "GpuMultipleClonerOptions", SimpleNamespace, raising=False)
    monkeypatch.setattr(faiss, "GpuParameterSpace", faiss.ParameterSpace, raising=False)
    monkeypatch.setattr(faiss, "index_cpu_to_all_gpus", clone, raising=False)
    monkeypatch.setattr(faiss, "GpuIndex", faiss.IndexIVF, raising=False)


def test_without_gpus_nothing_is_copied(index: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert num_gpus() == 0
    assert copied(index, 5, 4) is None
    assert "faiss is built without GPUs, or finds none" in caplog.text


@pytest.mark.parametrize("gpus", [None, "all"])
def test_gpus_search_only_where_they_are_asked_for(
    index: Any, monkeypatch: pytest.MonkeyPatch, gpus: str | None
) -> None:
    with_gpus(monkeypatch, lambda index, co: faiss.clone_index(index))
    monkeypatch.setattr(run, "open_shards", lambda *_: Shards((index,)))
    config: Any = SimpleNamespace(
        index="",
        retro_query_num_neighbors_query=5,
        retro_query_nprobe=None,
        retro_query_ef_search=256,
        retro_query_gpus=gpus,
    )
    others: tuple[Any, ...] = (SimpleNamespace(scratch=""), SimpleNamespace(nprobe=4), VECTORS)
    search = run.open_search(config, *others)
    assert (search.on_gpus is not None) == (gpus == "all")


def test_a_copy_answers_as_the_index_with_so_many_lists(
    index: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_gpus(monkeypatch, lambda index, co: faiss.clone_index(index))
    on_gpus = copied(index, 5, 4)
    assert on_gpus is not None
    faiss.ParameterSpace().set_index_parameter(index, "nprobe", 1)  # the copy keeps its own
    distances, ids = on_gpus.search(VECTORS[:50], 5)
    wanted = faiss_index.search(index, VECTORS[:50], 5, 4, 1)
    np.testing.assert_array_equal(ids, wanted[1])
    np.testing.assert_array_equal(distances, wanted[0])


def test_what_gpus_cannot_do_stays_on_the_cpu(
    index: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(index: Any, co: Any) -> Any:
        assert co.shard
        raise RuntimeError("This index type is not implemented on GPU.")

    with_gpus(monkeypatch, refuse)
    assert copied(index, MOST + 1, 4) is None
    assert copied(index, 5, MOST + 1) is None
    assert copied(index, 5, 4) is None
    assert "faiss has no GPU index of it: This index type is not implemented" in caplog.text


def test_a_copy_that_faiss_leaves_on_the_cpu_is_none(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    with_gpus(monkeypatch, lambda index, co: faiss.clone_index(index))
    graph = faiss_index.create(16, "HNSW4")
    assert copied(graph, 5, 0) is None
    assert "faiss has no GPU index of a IndexHNSWFlat" in caplog.text


def test_a_copy_is_on_gpus_if_all_its_parts_are(
    index: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rotated = faiss_index.create(16, "RR16,IVF16,Flat")
    faiss_index.train(rotated, VECTORS)
    faiss_index.add_vectors(rotated, VECTORS)
    graph = faiss_index.create(16, "HNSW4")

    for other, is_copied in ((faiss.clone_index(index), True), (rotated, True), (graph, False)):
        shards = faiss.IndexShards(16)
        shards.add_shard(index)
        shards.add_shard(other)
        with_gpus(monkeypatch, lambda index, co, shards=shards: shards)
        assert (copied(index, 5, 0) is not None) == is_copied


@pytest.mark.parametrize("index_str", ["IVF16_HNSW4,SQ8", "RR16,IVF16_HNSW4,Flat"])
def test_a_copy_compares_all_lists_where_the_index_has_a_graph(
    monkeypatch: pytest.MonkeyPatch, index_str: str
) -> None:
    index = faiss_index.create(16, index_str)
    faiss_index.train(index, VECTORS)
    faiss_index.add_codes(index, faiss_index.encode(index, VECTORS))
    before = faiss_index.search(index, VECTORS[:50], 5, 4, 64)
    with_gpus(monkeypatch, lambda index, co: faiss.clone_index(index))
    on_gpus = Shards((index,)).on_gpus(5, 4, 64)
    assert on_gpus is not None
    of_copy, of_index = (
        faiss.downcast_index(faiss.try_extract_index_ivf(x).quantizer)  # type: ignore[union-attr]
        for x in (on_gpus.copy, index)
    )
    assert isinstance(of_copy, faiss.IndexFlat)
    assert isinstance(of_index, faiss.IndexHNSW)
    np.testing.assert_array_equal(on_gpus.search(VECTORS[:50], 5)[1], before[1])
    np.testing.assert_array_equal(faiss_index.search(index, VECTORS[:50], 5, 4, 64)[1], before[1])


def test_centers_that_stood_in_for_a_graph_are_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    index = faiss_index.create(16, "IVF16_HNSW4,Flat")
    faiss_index.train(index, VECTORS)
    seen: list[Any] = []

    def clone(index: Any, co: Any) -> Any:
        seen.append(faiss.downcast_index(faiss.try_extract_index_ivf(index).quantizer))
        raise RuntimeError("no room")

    made: list[Any] = []
    plain = faiss.IndexFlat
    monkeypatch.setattr(faiss, "IndexFlat", lambda *args: made.append(plain(*args)) or made[-1])
    with_gpus(monkeypatch, clone)
    assert copied(index, 5, 4) is None
    assert seen[0].ntotal == 16
    assert made[0].this.own(), "Python frees them"
    assert not isinstance(faiss.downcast_index(index.quantizer), plain)


def test_shards_in_files_of_their_own_are_searched_on_the_cpu(
    index: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with_gpus(monkeypatch, lambda index, co: faiss.clone_index(index))
    assert Shards((index, index)).on_gpus(5, 4, 1) is None
    assert "searching on the CPU: the index is in 2 files" in caplog.text


def test_a_search_that_gpus_have_no_memory_for_goes_on_on_the_cpu(
    index: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with_gpus(monkeypatch, lambda index, co: faiss.clone_index(index))
    shards, calls = Shards((index,)), list[int]()
    on_gpus = shards.on_gpus(5, 4, 1)
    assert on_gpus is not None

    def fail(queries: Any, k: int) -> Any:
        calls.append(k)
        raise RuntimeError("Failed to cudaMalloc 1536 bytes")

    monkeypatch.setattr(on_gpus.copy, "search", fail)
    search = Search(shards, 4, 1, 5, on_gpus)
    wanted = faiss_index.search(index, VECTORS[:50], 5, 4, 1)
    for _ in range(2):
        distances, ids = search(VECTORS[:50])
        np.testing.assert_array_equal(ids, wanted[1])
        np.testing.assert_array_equal(distances, wanted[0])
    assert calls == [5], "it asks the GPUs no more"
    assert "the GPUs failed: Failed to cudaMalloc 1536 bytes" in caplog.text
