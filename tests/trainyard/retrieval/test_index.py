from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest

faiss = pytest.importorskip("faiss")

from tests.trainyard.retrieval.embedded import clustered  # noqa: E402
from trainyard.errors import ArtifactError, ConfigError  # noqa: E402
from trainyard.retrieval import index as faiss_index  # noqa: E402
from trainyard.retrieval import index_memory  # noqa: E402
from trainyard.retrieval.index_choice import choose_index, num_lists  # noqa: E402

VECTORS = clustered(3000, 16)

KINDS = ["Flat", "SQ8", "IVF16,SQ8", "IVF16_HNSW8,Flat", "PCA8,IVF16,SQ4", "LSH"]
WITHOUT_CODES = ["HNSW8", "IVF16,PQ4x4fs", "IVF16,Flat,RFlat"]


def fill(index: object, rows: int) -> None:
    for start in range(0, len(VECTORS), rows):
        piece = VECTORS[start : start + rows]
        if faiss_index.facts(index).has_codes:
            faiss_index.add_codes(index, faiss_index.encode(index, piece))
        else:
            faiss_index.add_vectors(index, piece)


def written(index: object) -> bytes:
    file = io.BytesIO()
    faiss_index.write(index, file)
    return file.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize("index_str", KINDS + WITHOUT_CODES)
def test_an_index_filled_in_pieces_is_that_of_one_call_of_faiss(
    index_str: str, tmp_path: Path
) -> None:
    index = faiss_index.create(16, index_str)
    faiss_index.train(index, VECTORS)
    (tmp_path / "empty").write_bytes(written(index))
    at_once = faiss_index.read(tmp_path / "empty")
    at_once.add(VECTORS)
    fill(index, 700)
    assert index.ntotal == at_once.ntotal == 3000
    (tmp_path / "filled").write_bytes(written(index))
    again = faiss_index.read(tmp_path / "filled")
    for one in (index, again):
        _, ids = faiss_index.search(one, VECTORS[:50], 5, nprobe=4, ef_search=16)
        _, expected = faiss_index.search(at_once, VECTORS[:50], 5, nprobe=4, ef_search=16)
        assert (ids == expected).mean() > (0.9 if index_str == "HNSW8" else 0.999)


@pytest.mark.parametrize("index_str", ["SQ8", "PCA8,IVF16,SQ4"])
def test_memory_that_was_taken_before_changes_no_byte(index_str: str) -> None:
    index, reserved = (faiss_index.create(16, index_str) for _ in range(2))
    for one in (index, reserved):
        faiss_index.train(one, VECTORS)
    counts = index_memory.list_counts(reserved, faiss_index.encode(reserved, VECTORS))
    index_memory.reserve(reserved, counts)
    assert reserved.ntotal == 0
    for one in (index, reserved):
        fill(one, 700)
    assert written(reserved) == written(index)
    sizes = faiss_index.list_sizes(index)
    assert counts.tolist() == ([3000] if sizes is None else sizes.tolist())


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("index_str", ["IVF16_HNSW8,SQ8", "IVF16,SQ8", "HNSW8"])
def test_the_bytes_do_not_depend_on_threads(index_str: str) -> None:
    found = []
    before = faiss.omp_get_max_threads()
    for threads in (1, 2):
        faiss.omp_set_num_threads(threads)
        index = faiss_index.create(16, index_str)
        faiss_index.train(index, VECTORS)
        fill(index, 1000)
        found.append(written(index))
    faiss.omp_set_num_threads(before)
    assert found[0] == found[1]


def test_more_lists_find_more() -> None:
    index = faiss_index.create(16, "IVF64_HNSW8,Flat")
    faiss_index.train(index, VECTORS)
    fill(index, 1000)
    exact = faiss_index.create(16, "Flat")
    fill(exact, 1000)
    _, truth = faiss_index.search(exact, VECTORS[:100], 10, 1, 1)
    shares = []
    for nprobe in (1, 8, 64, 1000):
        _, ids = faiss_index.search(index, VECTORS[:100], 10, nprobe, ef_search=8)
        shares.append(np.mean([np.isin(a, b).mean() for a, b in zip(truth, ids, strict=True)]))
    assert shares == sorted(shares)
    assert shares[-1] == shares[-2] == 1.0
    assert faiss_index.list_sizes(index).sum() == 3000
    assert faiss_index.list_sizes(exact) is None


@pytest.mark.parametrize(
    ("index_str", "words"),
    [
        ("IVF16,Nonsense", "faiss builds no index from it"),
        ("PQ7", "faiss builds no index from it"),
        ("IDMap,Flat", "IDMap keeps ids of its own"),
    ],
)
def test_a_string_that_makes_no_index_is_refused(index_str: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        faiss_index.create(16, index_str)
    assert "/" not in str(caught.value), "no path of faiss's sources"


@pytest.mark.slow
def test_a_damaged_file_is_no_index(tmp_path: Path) -> None:
    index = faiss_index.create(16, "Flat")
    fill(index, 3000)
    for name, content in (("cut", written(index)[:5000]), ("text", b"no index at all"), ("0", b"")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ArtifactError, match=f"{name}: not an index of faiss"):
            faiss_index.read(tmp_path / name)


@pytest.mark.parametrize(
    ("vectors", "training", "expected"),
    [
        (100, 100, "Flat"),
        (200_000, 200_000, "IVF1024,SQ8"),
        (200_000, 4_000, "IVF64,SQ8"),
        (5_000_000, 5_000_000, "IVF8192,SQ8"),
        (20_000_000, 20_000_000, "IVF16384_HNSW32,SQ8"),
        (1_000_000_000, 100_000_000, "OPQ64_256,IVF65536_HNSW32,PQ64"),
    ],
)
def test_the_default_grows_with_the_vectors(vectors: int, training: int, expected: str) -> None:
    choice = choose_index(vectors, 384, training)
    assert choice.index_str == expected
    assert f"{vectors:,} vectors" in choice.reason
    faiss_index.create(384, choice.index_str)


@pytest.mark.parametrize("kind", ["IVF12,Flat", "IVF4k,SQ8", "IVF1M,Flat", "IMI2x3,PQ4"])
def test_the_lists_of_a_string_are_those_of_faiss(kind: str) -> None:
    assert num_lists(kind) == faiss.index_factory(8, kind).nlist
