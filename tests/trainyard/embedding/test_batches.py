"""Rows of tokens and batches of texts: laws of their cuts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainyard.embedding.batches import cut_batches, framed_rows
from trainyard.embedding.ragged import groups_of

CLS, SEP, PAD = 1000, 1001, 1002


@given(st.lists(st.lists(st.integers(0, 99), max_size=9), max_size=12), st.integers(3, 8))
def test_every_text_is_framed_cut_and_found_by_its_number(
    texts: list[list[int]], longest: int
) -> None:
    bounds = np.cumsum([0, *map(len, texts)])
    ids = np.array([token for text in texts for token in text], np.uint32)
    rows = framed_rows(ids, bounds, longest, CLS, SEP, PAD)
    assert rows.lengths.tolist() == sorted(rows.lengths.tolist(), reverse=True)
    assert sorted(rows.order.tolist()) == list(range(len(texts)))
    for number, begin, end in zip(
        rows.order.tolist(), rows.bounds[:-1].tolist(), rows.bounds[1:].tolist(), strict=True
    ):
        inside = texts[number][: longest - 2] or [PAD]
        assert rows.tokens[begin:end].tolist() == [CLS, *inside, SEP]
        assert rows.positions[begin:end].tolist() == list(range(end - begin))


@given(st.lists(st.integers(3, 30), max_size=40), st.integers(1, 100))
def test_batches_follow_each_other_and_are_full(lengths: list[int], most: int) -> None:
    batches = cut_batches(np.array(lengths, np.int64), most)
    assert [text for batch in batches for text in batch] == list(range(len(lengths)))
    sums = [sum(lengths[text] for text in batch) for batch in batches]
    assert all(size <= most or len(b) == 1 for size, b in zip(sums, batches, strict=True))
    for size, following in zip(sums, batches[1:], strict=False):
        assert size + lengths[following.start] > most


@pytest.mark.parametrize("lengths", [[], [5], [5, 5, 4, 4, 4, 1]])
def test_groups_are_runs_of_equal_lengths(lengths: list[int]) -> None:
    groups = groups_of(lengths)
    assert [length for count, length in groups for _ in range(count)] == lengths
    assert len({length for _, length in groups}) == len(groups)
