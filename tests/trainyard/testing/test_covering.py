"""Covering selections: complete, small, of valid rows, and always the same."""

from __future__ import annotations

import pytest

from trainyard.testing.covering import combinations_of, covering_rows, cross


@pytest.mark.parametrize("strength", [1, 2, 3])
def test_every_combination_of_values_is_in_the_selection(strength: int) -> None:
    rows = cross({"a": (1, 2, 3), "b": "xy", "c": (True, False), "d": (4, 5, 6)})
    chosen = covering_rows(rows, strength)
    assert set(chosen) <= set(rows)
    assert combinations_of(chosen, strength) == combinations_of(rows, strength)
    assert len(chosen) == len(set(chosen)) < len(rows)
    assert chosen == covering_rows(rows, strength)


def test_invalid_rows_are_not_selected_and_their_pairs_not_required() -> None:
    factors = {"tp": (1, 2, 4), "sequence_parallel": (False, True), "pp": (1, 2, 4)}
    rows = cross(
        factors,
        lambda row: (row["tp"] > 1 or not row["sequence_parallel"]) and row["tp"] * row["pp"] <= 8,
    )
    chosen = covering_rows(rows)
    assert all(row in rows for row in chosen)
    assert ((0, 1), (1, True)) not in combinations_of(chosen)
    assert combinations_of(chosen) == combinations_of(rows)


def test_eight_factors_of_three_values_need_a_few_rows_of_6561() -> None:
    rows = cross({f"f{i}": (0, 1, 2) for i in range(8)})
    assert 9 <= len(covering_rows(rows)) <= 20


def test_no_rows_need_no_selection() -> None:
    assert covering_rows([]) == []
