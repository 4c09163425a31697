"""Any common run of words of the given length is found, wherever it begins."""

from __future__ import annotations

import numpy as np
import pytest

from trainyard.collection.duplicates.spans import Spans, winnowed


def words(seed: int, count: int) -> list[str]:
    return [f"w{n}" for n in np.random.default_rng(seed).integers(0, 10**6, count)]


@pytest.mark.parametrize("before", range(0, 20, 3))
@pytest.mark.parametrize("normalize", [True, False])
def test_texts_with_as_many_words_in_common_share_an_ngram(before: int, normalize: bool) -> None:
    spans = Spans(30, normalize)
    shared = words(1, 30)
    one = " ".join([*words(2, before), *shared, *words(3, 11)])
    other = " ".join([*words(4, 17), *shared, *words(5, before)])
    both = {ngram for _, ngram in spans.selected(one)} & {
        ngram for _, ngram in spans.selected(other)
    }
    assert both
    assert all(ngram in " ".join(shared) for ngram in both)
    assert len(next(iter(both)).split()) == 23


def test_every_window_keeps_its_least_hash() -> None:
    hashes = np.random.default_rng(0).integers(0, 50, 300, np.uint64)
    kept = set(winnowed(hashes, 8).tolist())
    for i in range(len(hashes) - 7):
        window = range(i, i + 8)
        assert {j for j in window if hashes[j] == min(hashes[k] for k in window)} & kept
    assert len(winnowed(hashes[:0], 8)) == 0
    assert winnowed(hashes[:3], 8).tolist() == [
        int(np.flatnonzero(hashes[:3] == min(hashes[:3]))[-1])
    ]


def test_cut_takes_out_the_words_and_one_blank() -> None:
    spans = Spans(10, True)  # n-grams of 3 words
    assert spans.cut("A b, C! d e f g.", [1]) == ("A e f g.", ["b, C! d"])
    assert spans.cut("a b c d e f", [0]) == ("d e f", ["a b c"])
    assert spans.cut("a b c d e f", [1, 2]) == ("a f", ["b c d e"])
    assert spans.cut("a b c", [0]) == ("", ["a b c"])
