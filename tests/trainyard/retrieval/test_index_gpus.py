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

from tests.trainyard.retrieval.embedded import clustered
from trainyard.retrieval import index as faiss_index
from trainyard.retrieval.index_gpus import MOST, copied, num_gpus

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


def test_without_gpus_nothing_is_copied(index: Any) -> None:
    assert num_gpus() == 0
    assert copied(index, 5, 4) is None


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
