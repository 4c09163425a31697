"""The sample indices against Megatron-LM's own, and the laws they obey."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.vectors import GOLDEN
from trainyard.datasets import samples
from trainyard.datasets.samples import build_sample_indices, count_samples, locate_samples
from trainyard.errors import DataError


@pytest.fixture
def golden() -> dict[str, Any]:
    vectors: dict[str, Any] = json.loads((GOLDEN / "megatron_vectors.json").read_text())["gpt"]
    return vectors


def test_indices_equal_megatrons_in_all_cases(golden: dict[str, Any]) -> None:
    lengths = np.array(golden["doc_lengths"], np.int32)
    assert len(golden["cases"]) == 15
    for case in golden["cases"]:
        drop = case["split"] != "valid" or case["drop_last_partial_validation_sequence"]
        indices = build_sample_indices(
            lengths,
            np.arange(len(lengths), dtype=np.int32),
            golden["seq_length"],
            golden["seed"],
            case["num_samples"],
            drop_last_partial=drop,
        )
        for name in ("document_index", "sample_index", "shuffle_index"):
            assert getattr(indices, name).tolist() == case[name], (case["num_samples"], name)


def test_types_are_those_of_megatron() -> None:
    indices = build_sample_indices(
        np.full(10, 50, np.int32), np.arange(10, dtype=np.int32), seq_length=16, seed=1
    )
    assert indices.document_index.dtype == np.int32
    assert indices.sample_index.dtype == np.int32
    assert indices.shuffle_index.dtype == np.uint32


@pytest.mark.parametrize("chunk", [1, 2, 7, 64])
@pytest.mark.parametrize("extra", [True, False])
def test_chunks_do_not_matter(chunk: int, extra: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(chunk)
    lengths = random.integers(0, 30, 50).astype(np.int32)
    documents = np.arange(50, dtype=np.int32)
    for num_samples, drop in [(None, True), (None, False), (130, True), (400, False)]:
        options = (lengths, documents, 8, 3, num_samples, extra, drop)
        whole = build_sample_indices(*options)
        with monkeypatch.context() as patch:
            patch.setattr(samples, "CHUNK", chunk)
            cut = build_sample_indices(*options)
        for name in ("document_index", "sample_index", "shuffle_index"):
            assert np.array_equal(getattr(whole, name), getattr(cut, name))


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=60),
    st.integers(1, 12),
    st.integers(0, 1),
    st.booleans(),
    st.integers(0, 99),
)
def test_cut_as_by_a_walk(lengths: list[int], s: int, extra: int, drop: bool, seed: int) -> None:
    stored = np.array(lengths, np.int32)
    order = np.random.RandomState(seed).permutation(len(lengths)).astype(np.int32)
    index = locate_samples(stored, order, s, extra, drop)
    flat = [(k, i) for k, d in enumerate(order) for i in range(lengths[d])]
    begins = range(0, max(len(flat) - extra, 0), s)
    full = [b for b in begins if b + s + extra <= len(flat)]
    assert len(index) - 1 == len(full if drop else begins)
    for k in range(1, len(full) + 1):
        document, offset = flat[k * s + extra - 1]
        assert index[k].tolist() == [document, offset + 1 - extra]


def test_the_count_of_samples_is_exact_where_float_is_not() -> None:
    tokens = 2**25 + 2
    assert int(np.float32(tokens - 1)) == 2**25  # what Megatron-LM divides: one sample is lost
    assert count_samples(tokens, 1, 1, drop_last_partial=False) == 2**25 + 1
    assert count_samples(2**53 + 2, 2, 1, drop_last_partial=False) == 2**52 + 1


def test_shuffles_are_those_of_one_random_state_in_order() -> None:
    lengths = np.full(10, 20, np.int32)
    documents = np.arange(10, dtype=np.int32)
    indices = build_sample_indices(lengths, documents, 16, 5, num_samples=26)  # 3 epochs, 1 apart
    random = np.random.RandomState(5)
    first, last = np.tile(documents, 2), documents.copy()
    random.shuffle(first)
    random.shuffle(last)
    assert indices.document_index.tolist() == [*first, *last]
    before, behind = np.arange(24), np.arange(24, len(indices.shuffle_index))
    random.shuffle(before)
    random.shuffle(behind)
    assert indices.shuffle_index.tolist() == [*before, *behind]


@pytest.mark.parametrize("start", [0, 34], ids=["aligned", "as in an .idx"])
def test_memory_does_not_grow_with_the_documents(start: int) -> None:
    stored = np.zeros(start, np.uint8).tobytes() + np.full(2_000_000, 100, np.int32).tobytes()
    lengths = np.frombuffer(stored, np.int32, offset=start)
    documents = np.arange(len(lengths), dtype=np.int32)
    tracemalloc.start()
    try:
        indices = build_sample_indices(lengths, documents, 4096, 1)
        kept, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(indices.document_index) == len(lengths)
    assert (peak - kept) / len(lengths) < 4  # a few chunks, here a tenth of all documents


def test_documents_without_a_token_give_no_samples() -> None:
    nothing = np.zeros(3, np.int32)
    documents = np.arange(3, dtype=np.int32)
    assert len(build_sample_indices(nothing, documents, 4, 1).shuffle_index) == 0
    with pytest.raises(DataError, match="5 samples are needed, but the documents have no token"):
        build_sample_indices(nothing, documents, 4, 1, num_samples=5)
