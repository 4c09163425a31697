"""Indices of faiss from others: a forged one ends in a refusal, and leads to no other file."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

faiss = pytest.importorskip("faiss")

from stages.faiss_query.search import BlockSearch, Rules  # noqa: E402
from tests.trainyard.retrieval.embedded import clustered  # noqa: E402
from trainyard.errors import ArtifactError  # noqa: E402
from trainyard.retrieval import index as faiss_index  # noqa: E402
from trainyard.retrieval.index_document import IndexDocument  # noqa: E402
from trainyard.retrieval.index_trial_program import THROUGH_ALL, use  # noqa: E402
from trainyard.retrieval.index_trial_program import VECTORS as IN_A_TRIAL  # noqa: E402

VECTORS = clustered(2000, 16)
KINDS = ("Flat", "IVF16,SQ8", "IVF16_HNSW8,PQ8", "HNSW8", "OPQ8_16,IVF8,PQ8", "IVF16,PQ4x4fs,RFlat")


@cache
def trained(kind: str) -> bytes:
    """An empty index as a file."""
    index = faiss_index.create(16, kind)
    faiss_index.train(index, VECTORS)
    return bytes(faiss.serialize_index(index))


HUGE = (2**40).to_bytes(8, "little")

FORGED: dict[str, tuple[str, dict[int, bytes]]] = {
    "dimensions": ("Flat", {4: b"\xff\xff\xff\x7f"}),
    "no dimensions": ("Flat", {4: b"\0\0\0\0"}),
    "negative dimensions": ("Flat", {4: b"\xff\xff\xff\xff"}),
    "size of a list": ("Flat", {37: HUGE}),
    "size past every address": ("Flat", {37: b"\xff" * 8}),
    "number of vectors": ("Flat", {8: HUGE}),
    "type": ("Flat", {0: b"hell"}),
    "edges of a graph, an abort": ("HNSW8", {134: bytes(4), 213: b"\5\0\0", 175: b"\1", 91: b"\5"}),
    "bits of hashes, a segmentation fault": ("LSH", {42: b"\1" + bytes(7)}),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", FORGED)
def test_a_forged_index_is_refused(case: str, tmp_path: Path) -> None:
    kind, changes = FORGED[case]
    data = bytearray(trained(kind))
    for place, value in changes.items():
        data[place : place + len(value)] = value
    (tmp_path / "index").write_bytes(data)
    with pytest.raises(ArtifactError, match="index: not an index of faiss"):
        faiss_index.read(tmp_path / "index")


def test_a_trial_compares_few_queries_with_all_vectors(tmp_path: Path) -> None:
    """All with all would take longer than the file allows, for an index of some millions."""
    index = faiss.deserialize_index(np.frombuffer(trained("IVF16,SQ8"), np.uint8))
    index.add(VECTORS)
    faiss_index.reset_counters()
    use(index, tmp_path)
    compared = faiss_index.count_compared(index, IN_A_TRIAL)
    total = int(index.ntotal)
    assert THROUGH_ALL * total < compared < (THROUGH_ALL + IN_A_TRIAL / 4) * total


@pytest.mark.slow
def test_lists_in_another_file_are_refused_and_the_file_stays_as_it_is(tmp_path: Path) -> None:
    """faiss would write added vectors to any file that an index names."""
    victim = tmp_path / "victim"
    index = faiss.index_factory(16, "IVF16,Flat")
    index.train(VECTORS)
    lists = faiss.OnDiskInvertedLists(16, index.code_size, str(victim))
    index.replace_invlists(lists)
    index.add(VECTORS)
    faiss.write_index(index, str(tmp_path / "index"))
    victim.write_bytes(before := b"export PATH\n" + bytes(victim.stat().st_size - 12))
    with pytest.raises(ArtifactError, match="its lists are not in the file itself"):
        faiss_index.read(tmp_path / "index")
    assert victim.read_bytes() == before


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["IDMap,Flat", "IDMap2,IVF16,Flat"])
def test_an_index_with_ids_of_its_own_is_refused(kind: str, tmp_path: Path) -> None:
    index = faiss.index_factory(16, kind)
    index.train(VECTORS)
    faiss.write_index(index, str(tmp_path / "index"))
    with pytest.raises(ArtifactError, match=r"IndexIDMap2? is no index for neighbours"):
        faiss_index.read(tmp_path / "index")


@pytest.mark.parametrize(
    "lie", [{"dimensions": 8}, {"num_lists": 4}, {"num_vectors": 7}, {"dimensions": 2**40}]
)
def test_an_index_that_is_not_the_described_one_is_refused(lie: dict[str, Any]) -> None:
    index = faiss.deserialize_index(np.frombuffer(trained("IVF16,SQ8"), np.uint8))
    facts: dict[str, Any] = {"dimensions": 16, "num_lists": 16}
    told = {"index_str": "", "reason": "", "code_bytes": 17, "num_training": 1}
    faiss_index.check_described(index, IndexDocument(**facts, **told), "here")
    (name,) = lie
    with pytest.raises(ArtifactError, match=f"here: the index has {name}"):
        faiss_index.check_described(index, IndexDocument(**(facts | lie), **told), "here")


@pytest.mark.parametrize("ids", [[0, 7], [-2, 0], [2**62, 0], [-(2**63), 1]], ids=str)
def test_an_index_that_finds_no_chunks_of_the_database_is_refused(ids: list[int]) -> None:
    def search(vectors: Any) -> tuple[Any, Any]:
        return np.zeros((len(vectors), 2), np.float32), np.array([ids] * len(vectors))

    class Database:
        url = "db"

        def __len__(self) -> int:
            return 7

    given: Any = {"search": search, "num_kept": 2, "embeddings": None}
    rules: Any = Rules(Any, Database(), [], None)  # type: ignore[arg-type]
    block = BlockSearch(**given, rules=rules)
    with pytest.raises(ArtifactError, match=r"--index: it finds chunk -?[0-9]+, and db has 7"):
        block._of_rows(np.zeros((3, 4), np.float32), 0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_damaged_bytes_give_an_index_or_a_refusal(kind: str, tmp_path: Path) -> None:
    """And this process lives on, whatever faiss does with them."""
    whole, path = trained(kind), tmp_path / "index"
    refused = 0
    for seed in range(15):
        rng = random.Random(seed)
        data = bytearray(whole)
        for _ in range(rng.choice([1, 1, 3])):
            value = rng.choice([0, 1, 5, 2**31 - 1, 2**32 - 1, 2**40, 2**64 - 1])
            place = rng.choice([rng.randrange(min(300, len(data))), rng.randrange(len(data))])
            data[place : place + 8] = value.to_bytes(8, "little")
        path.write_bytes(data)
        try:
            faiss_index.read(path)
        except ArtifactError:
            refused += 1
    assert refused
