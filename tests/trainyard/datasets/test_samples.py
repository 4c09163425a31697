"""The sample indices against Megatron-LM's own, and the laws they obey."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from tests.vectors import GOLDEN
from trainyard.datasets.samples import build_sample_indices, locate_samples


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


@pytest.mark.parametrize("extra", [0, 1])
@pytest.mark.parametrize("seed", range(5))
def test_bounds_equal_a_walk_over_the_tokens(extra: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    lengths = random.integers(0, 9, 60).astype(np.int32)
    documents = random.permutation(60).astype(np.int32)
    s = 7
    index = locate_samples(lengths, documents, s, extra, drop_last_partial=True)
    owner = np.repeat(np.arange(60), lengths[documents])
    offset = np.concatenate([np.arange(n) for n in lengths[documents]])
    assert len(index) == (len(owner) - extra) // s + 1
    for k in range(1, len(index)):
        last = k * s + extra - 1
        assert tuple(index[k]) == (owner[last], offset[last] + 1 - extra)


def test_types_are_those_of_megatron() -> None:
    indices = build_sample_indices(
        np.full(10, 50, np.int32), np.arange(10, dtype=np.int32), seq_length=16, seed=1
    )
    assert indices.document_index.dtype == np.int32
    assert indices.sample_index.dtype == np.int32
    assert indices.shuffle_index.dtype == np.uint32


def test_every_sample_is_served_once() -> None:
    indices = build_sample_indices(
        np.full(10, 50, np.int32), np.arange(10, dtype=np.int32), 16, seed=3, num_samples=70
    )
    assert sorted(indices.shuffle_index) == list(range(len(indices.sample_index) - 1))
    assert len(indices.shuffle_index) >= 70
