"""Positions, bounds and masks against loops over the tokens."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from trainyard.datasets.masks import (
    attention_mask,
    cu_seqlens,
    document_numbers,
    positions,
    segments_after_ends,
)


@st.composite
def ends_of_documents(draw: st.DrawFn) -> NDArray[np.bool_]:
    b, s = draw(st.integers(1, 4)), draw(st.integers(1, 9))
    flat = draw(st.lists(st.booleans(), min_size=b * s, max_size=b * s))
    return np.array(flat, np.bool_).reshape(b, s)


def slow_numbers(ends: list[bool]) -> list[int]:
    """The document of each token; an end belongs to what it ends."""
    numbers, number = [], 0
    for end in ends:
        numbers.append(number)
        number += end
    return numbers


@given(ends_of_documents())
def test_positions_bounds_and_mask_are_those_of_a_walk(ends: NDArray[np.bool_]) -> None:
    b, s = ends.shape
    segments = segments_after_ends(ends)
    places = positions(segments)
    bounds, longest = cu_seqlens(segments)
    masks = attention_mask(bounds, s)
    assert bounds.shape == (b, s + 1)
    assert masks.shape == (b, 1, s, s)
    for row in range(b):
        numbers = slow_numbers(ends[row].tolist())
        begins = [numbers.index(number) for number in range(numbers[-1] + 1)]
        assert places[row].tolist() == [i - begins[n] for i, n in enumerate(numbers)]
        assert bounds[row].tolist() == begins + [s] * (s + 1 - len(begins))
        assert longest[row] == max(numbers.count(n) for n in set(numbers))
        assert document_numbers(bounds)[row].tolist() == numbers
        for i in range(s):
            for j in range(s):
                assert masks[row, 0, i, j] == (j > i or numbers[i] != numbers[j])


def test_types_are_those_that_kernels_take() -> None:
    segments = segments_after_ends(np.zeros((2, 5), np.bool_))
    assert positions(segments).dtype == np.int64
    assert [array.dtype for array in cu_seqlens(segments)] == [np.int32, np.int32]


@pytest.mark.parametrize("s", [1, 4])
def test_without_bounds_the_mask_is_causal(s: int) -> None:
    assert (attention_mask(None, s)[0] == ~np.tri(s, dtype=np.bool_)).all()
