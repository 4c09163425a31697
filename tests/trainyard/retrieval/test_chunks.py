"""Chunks: a partition of every document, and samples of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainyard.errors import ConfigError
from trainyard.retrieval.chunks import cut_documents
from trainyard.retrieval.dataset_infos import num_sampled
from trainyard.retrieval.dataset_names import dataset_names
from trainyard.retrieval.hdf5 import block_name
from trainyard.retrieval.sampling import sample_chunks


@given(st.lists(st.integers(0, 50), min_size=1, max_size=9), st.integers(1, 9))
def test_chunks_laid_end_to_end_are_the_document(lengths: list[int], chunk_length: int) -> None:
    documents, starts, ends = cut_documents(np.array(lengths), chunk_length)
    assert (np.diff(documents) >= 0).all()
    for document, length in enumerate(lengths):
        mine = documents == document
        tokens = [i for a, b in zip(starts[mine], ends[mine], strict=True) for i in range(a, b)]
        assert tokens == list(range(length))
        assert (ends - starts)[mine][:-1].tolist() == [chunk_length] * (mine.sum() - 1) * (
            length > 0
        )


@pytest.mark.parametrize("mode", ["uniform", "prefix"])
@pytest.mark.parametrize(("num_chunks", "count"), [(1, 0), (1, 1), (50, 50), (50_000, 37)])
def test_a_sample_has_ascending_different_chunks(mode: str, num_chunks: int, count: int) -> None:
    chosen = sample_chunks(num_chunks, count, mode, (1234, 0))  # type: ignore[arg-type]
    assert len(chosen) == count
    assert (np.diff(chosen) > 0).all()
    assert not count or (chosen[0] >= 0 and chosen[-1] < num_chunks)


def test_a_uniform_sample_comes_from_everywhere_and_depends_on_the_seed() -> None:
    counts = np.zeros(40)
    for seed in range(500):
        counts[sample_chunks(40, 10, "uniform", (seed, 1))] += 1
    assert abs(counts - 125).max() < 50  # five standard deviations
    first, other = (sample_chunks(10**6, 100, "uniform", (seed, 0)) for seed in (1, 2))
    assert first.tolist() != other.tolist()
    assert first[-1] > 500_000
    assert sample_chunks(10**6, 100, "prefix", (1, 0)).tolist() == list(range(100))


def test_shares_of_the_sample_are_rounded_down() -> None:
    assert [num_sampled(10, ratio, 3.0) for ratio in (1.0, 2.0)] == [3, 6]


def test_blocks_are_named_by_their_documents() -> None:
    assert block_name("a/en", 0, 22119, 22119) == "individual/a/en/000000-022119.hdf5"
    assert block_name("en", 100_000, 200_000, 1_000_000).endswith("/0100000-0200000.hdf5")
    assert block_name("en", 0, 1, 1) == "individual/en/0-1.hdf5"


def test_datasets_have_the_shortest_names_that_differ() -> None:
    assert dataset_names(["/data/en", "s3://bucket/de"]) == ["en", "de"]
    assert dataset_names(["/data/en/tokens", "../de/tokens"]) == ["en/tokens", "de/tokens"]
    with pytest.raises(ConfigError, match="--data-path names data/en twice"):
        dataset_names(["./data/en", "data/en"])
