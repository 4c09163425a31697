"""Made-up documents."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from trainyard.datasets.build import build_datasets
from trainyard.datasets.config import DataConfig
from trainyard.datasets.mock import MockTokens
from trainyard.datasets.sample_format import SampleFormat
from trainyard.errors import ConfigError


def test_documents_are_megatrons() -> None:
    mock = MockTokens(vocab_size=50257, eod=50256)
    lengths = np.random.default_rng(seed=0).integers(low=1, high=4096, size=100_000, dtype=np.int32)
    assert np.array_equal(mock.sequence_lengths, lengths)
    for document in (0, 1, 77, 99_999):
        expected = [*range(1, lengths[document]), 50256]
        assert mock.get(document).tolist() == expected


def test_a_part_of_a_document_is_a_slice_of_it() -> None:
    mock = MockTokens(50257, 50256)
    whole = mock.get(3)
    for offset, length in [(0, 5), (7, 20), (len(whole) - 2, 2), (len(whole), 0), (4, None)]:
        stop = None if length is None else offset + length
        assert mock.get(3, offset, length).tolist() == whole[offset:stop].tolist()


def test_a_small_vocabulary_begins_again() -> None:
    mock = MockTokens(vocab_size=10, eod=0, num_documents=5, longest=40)
    every = np.concatenate([mock.get(document) for document in range(len(mock))])
    assert every.max() == 9
    assert mock.get(0)[:11].tolist()[:10] == [1, 2, 3, 4, 5, 6, 7, 8, 9, 1]


def test_a_dataset_has_the_samples_that_were_asked_for() -> None:
    sample_format = SampleFormat(seq_length=24, seed=1, vocab_size=300, eod=299)
    data = DataConfig(mock_data=True, dataset_size=10)
    built = build_datasets(data, sample_format, (10, 10, 10))
    whole = build_datasets(data, sample_format, (25, 0, 0)).train
    assert built.train is not None
    assert whole is not None
    assert (len(built.train), len(built.valid[0][1]), len(built.test[0][1])) == (10, 10, 10)
    assert len(whole) >= 25  # further epochs
    assert sum(MockTokens(300, 299, tokens_of_a_third=241).sequence_lengths) == 3 * 241


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"data_path": ("x",), "dataset_size": 5}, "--dataset-size only applies with --mock"),
        ({"mock_data": True, "dataset_size": 0}, "--dataset-size must be at least 1, got 0"),
    ],
)
def test_an_invalid_size_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        DataConfig(**options)
