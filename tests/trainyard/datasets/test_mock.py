"""Made-up documents."""

from __future__ import annotations

import numpy as np

from trainyard.datasets.mock import MockTokens


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
