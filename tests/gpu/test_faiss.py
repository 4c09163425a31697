"""Searches of faiss on GPUs find what they find on the CPU, for indices that its kernels know.
Needs a build of faiss for GPUs, such as faiss-gpu or faiss-gpu-cu12, in place of faiss-cpu.

python -m pytest -m gpu tests/gpu/test_faiss.py"""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("faiss")

from tests.trainyard.retrieval.embedded import clustered
from trainyard.retrieval import index as faiss_index
from trainyard.retrieval.index_gpus import copied, num_gpus
from trainyard.retrieval.shards import Shards

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(not num_gpus(), reason="needs a build of faiss for GPUs"),
]

VECTORS = clustered(20_000, 64)
QUERIES = clustered(500, 64)
TRAINING = 3_000
"""Vectors: a rotation (OPQ) is found by 50 trainings of a product quantizer, 94 s for all vectors
on two cores; np leaves out faiss's reordering of codes, 20 s."""
K, NPROBE, EF_SEARCH = 20, 8, 256
ALIKE = 0.99
"""Of the ids: roundings exchange neighbours at nearly equal distances."""


@pytest.mark.parametrize(
    "index_str", ["Flat", "IVF64,Flat", "IVF64,SQ8", "IVF64_HNSW32,PQ16np", "OPQ16_64,IVF64,PQ16np"]
)
def test_a_search_on_gpus_finds_what_the_cpu_finds(index_str: str) -> None:
    index = faiss_index.create(64, index_str)
    faiss_index.train(index, VECTORS[:TRAINING])
    faiss_index.add_codes(index, faiss_index.encode(index, VECTORS))
    on_gpus = Shards((index,)).on_gpus(K, NPROBE, EF_SEARCH)
    assert on_gpus is not None
    found, theirs = on_gpus.search(QUERIES, K)
    distances, ids = faiss_index.search(index, QUERIES, K, NPROBE, EF_SEARCH)
    same = [len(set(a) & set(b)) / K for a, b in zip(theirs.tolist(), ids.tolist(), strict=True)]
    assert np.mean(same) > ALIKE
    np.testing.assert_allclose(found[:, 0], distances[:, 0], rtol=1e-2, atol=1e-2)


def test_what_faiss_has_no_kernel_for_stays_on_the_cpu() -> None:
    index = faiss_index.create(64, "HNSW16")
    faiss_index.add_vectors(index, VECTORS[:1000])
    assert copied(index, K, 0) is None
    flat = faiss_index.create(64, "Flat")
    assert copied(flat, 4096, 0) is None
