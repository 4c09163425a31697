"""Rules of attention, and the matrices and lengths made of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from trainyard.attention.masks import (
    CAUSAL,
    FULL,
    AttentionMask,
    as_mask,
    causal_mask,
    cross_mask,
    materialise,
    packed_lengths,
    trim_bounds,
)

CPU = torch.device("cpu")
BOUNDS = torch.tensor([[0, 3, 5, 9, 9], [0, 1, 8, 9, 9]], dtype=torch.int32)
RULES = {
    "causal": CAUSAL,
    "window": AttentionMask(window=(2, 0)),
    "two-sided": AttentionMask(causal=False, window=(1, 2)),
    "left": AttentionMask(causal=False, window=(3, -1)),
    "documents": AttentionMask(bounds=BOUNDS),
    "documents and window": AttentionMask(bounds=BOUNDS, window=(2, -1)),
    "whole documents": AttentionMask(causal=False, bounds=BOUNDS),
}


def allowed(mask: AttentionMask, row: int, query: int, key: int) -> bool:
    """The rules, said once more for one pair."""
    left, right = mask.window or (-1, -1)
    if mask.causal and key > query:
        return False
    if (left >= 0 and query - key > left) or (right >= 0 and key - query > right):
        return False
    if mask.bounds is None:
        return True
    begins = [int(x) for x in mask.bounds[row]]
    return all((query >= begin) == (key >= begin) for begin in begins)


@pytest.mark.parametrize("mask", RULES.values(), ids=RULES)
@pytest.mark.parametrize("s", [9, 4, 1])
def test_the_matrix_says_what_the_rules_say(mask: AttentionMask, s: int) -> None:
    matrix = materialise(mask, s, 9, CPU)
    assert matrix is not None
    for row in range(2):
        for query in range(9 - s, 9):
            for key in range(9):
                found = matrix[min(row, matrix.shape[0] - 1), 0, query - (9 - s), key]
                assert bool(found) == allowed(mask, row, query, key)


def test_queries_of_another_sequence_see_the_keys_before_the_padding() -> None:
    mask = cross_mask(torch.tensor([2, 4]), 3, 4)
    matrix = materialise(mask, 3, 4, CPU)
    assert matrix is not None
    assert matrix[:, 0].tolist() == [[[True, True, False, False]] * 3, [[True] * 4] * 3]
    of_queries, of_keys = packed_lengths(mask, 3, 4)
    assert of_queries.tolist() == [0, 3, 3, 6, 6]
    assert of_keys.tolist() == [0, 2, 4, 8, 8]


def test_nothing_forbidden_needs_no_matrix() -> None:
    assert materialise(FULL, 3, 3, CPU) is None
    assert CAUSAL.plain
    assert not AttentionMask(window=(1, 0)).plain


def test_positions_say_where_the_queries_are() -> None:
    places = torch.tensor([[2, 7], [5, 6]])
    matrix = materialise(AttentionMask(window=(2, 0), positions=places), 2, 9, CPU)
    assert matrix is not None
    for row in range(2):
        for query in range(2):
            at = int(places[row, query])
            assert matrix[row, 0, query].nonzero().flatten().tolist() == list(range(at - 2, at + 1))


def test_a_matrix_and_rules_hold_together() -> None:
    dense = causal_mask(torch.tensor([[4, 5], [2, 3]]), 6)
    mask = replace(as_mask(dense), bounds=torch.tensor([[0, 4, 6], [0, 6, 6]]))
    matrix = materialise(replace(mask, positions=torch.tensor([[4, 5], [2, 3]])), 2, 6, CPU)
    assert matrix is not None
    assert matrix[:, 0].int().tolist() == [
        [[0, 0, 0, 0, 1, 0], [0, 0, 0, 0, 1, 1]],
        [[1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 0, 0]],
    ]


@pytest.mark.parametrize("mask", RULES.values(), ids=RULES)
@pytest.mark.parametrize(("begin", "end"), [(0, 6), (2, 6), (3, 9)])
def test_a_part_is_a_corner_of_the_whole(mask: AttentionMask, begin: int, end: int) -> None:
    whole = materialise(mask, 9, 9, CPU)
    part = materialise(mask.part(begin, end), 2, end - begin, CPU)
    assert whole is not None
    assert part is not None
    assert torch.equal(part, whole[:, :, end - 2 : end, begin:end])


@pytest.mark.parametrize("query", [0, 3, 8])
@pytest.mark.parametrize("mask", RULES.values(), ids=RULES)
def test_no_later_query_looks_before_the_first_key(mask: AttentionMask, query: int) -> None:
    whole = materialise(mask, 9, 9, CPU)
    assert whole is not None
    assert not whole[:, :, query:, : mask.first_key(query)].any()


@pytest.mark.parametrize("s", [9, 4, 1])
def test_packed_lengths_are_those_of_the_documents(s: int) -> None:
    of_queries, of_keys = packed_lengths(AttentionMask(bounds=BOUNDS), s, 9)
    assert of_keys.dtype == of_queries.dtype == torch.int32
    begin, documents = 9 - s, [(0, 3), (3, 5), (5, 9), (9, 9), (0, 1), (1, 8), (8, 9), (9, 9)]
    assert of_keys.diff().tolist() == [b - a for a, b in documents]
    assert of_queries.diff().tolist() == [max(b, begin) - max(a, begin) for a, b in documents]
    assert (int(of_queries[-1]), int(of_keys[-1])) == (2 * s, 18)


def test_trimmed_bounds_are_the_same_documents() -> None:
    full = torch.full((2, 65), 64, dtype=torch.int32)
    full[0, :3] = torch.tensor([0, 20, 40])
    full[1, 0] = 0
    trimmed = trim_bounds(full)
    assert trimmed.shape == (2, 16)
    mask, expected = (materialise(AttentionMask(bounds=b), 64, 64, CPU) for b in (trimmed, full))
    assert mask is not None
    assert expected is not None
    assert torch.equal(mask, expected)
    assert trim_bounds(full[:, :17].clamp(max=16)).shape == (2, 16)
