"""The outline of a pair: what its ends tell agrees with what the whole says."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from tests.trainyard.corpus.token_files import write_tokens
from trainyard.artifacts import store
from trainyard.corpus.indexed import IndexedDataset
from trainyard.corpus.outline import outline
from trainyard.errors import ArtifactError

LENGTHS = (3, 0, 5, 1, 2)
DOCUMENTS = [[np.arange(length)] for length in LENGTHS]


@pytest.mark.few_cases(1)
def test_the_outline_counts_like_the_whole_index(store_url: str) -> None:
    prefix = write_tokens(store.join(store_url, "t"), DOCUMENTS)
    found, whole = outline(prefix), IndexedDataset(prefix)
    assert found.is_whole
    assert found.dtype == whole.dtype
    assert found.num_sequences == len(whole)
    for first, last in combinations(range(len(LENGTHS) + 1), 2):
        assert found.count_tokens(first, last) == sum(LENGTHS[first:last])


def test_an_empty_pair_is_complete(store_url: str) -> None:
    assert outline(write_tokens(store.join(store_url, "t"), [])).is_whole


def test_truncated_and_missing_files_are_detected(store_url: str) -> None:
    prefix = write_tokens(store.join(store_url, "t"), DOCUMENTS)
    whole = store.read_bytes(prefix + ".bin")
    store.write_bytes(prefix + ".bin", whole[:-1])
    assert not outline(prefix).is_whole
    store.delete(prefix + ".bin")
    with pytest.raises(ArtifactError, match=r"t\.bin"):
        outline(prefix)
    for size in (0, 20, 60):
        store.write_bytes(prefix + ".idx", store.read_bytes(prefix + ".idx")[:size])
        with pytest.raises(ArtifactError, match=r"t\.idx"):
            outline(prefix)
