"""Pairwise testing: few of many combinations, such that every pair of choices occurs.

Most faults of options come from one of them or from two together (Kuhn, Wallace, Gallo, IEEE TSE
30(6), 2004), so a selection in which every pair of values occurs finds nearly all of what the whole
cross product would. Pure; a function of its arguments alone."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import combinations, product
from typing import Any

Row = tuple[Hashable, ...]
"""One value of every factor, in a fixed order."""

Combination = tuple[tuple[int, Hashable], ...]
"""Values of some factors, each with the place of its factor."""


def cross(
    factors: Mapping[str, Sequence[Hashable]],
    is_valid: Callable[[Mapping[str, Any]], bool] = lambda row: True,
) -> list[Row]:
    """All combinations of the factors' values that are valid, the last factor moving fastest."""
    names = list(factors)
    rows = product(*factors.values())
    return [row for row in rows if is_valid(dict(zip(names, row, strict=True)))]


def covering_rows(rows: Sequence[Row], strength: int = 2) -> list[Row]:
    """A small selection of `rows` that has every combination of `strength` values that they have.

    What occurs in no row (an invalid pair) is not asked for. Greedy: each row taken has the most
    combinations that are still missing, the earliest of several; that is within a factor of the
    logarithm of the best, and in practice within a few rows."""
    numbers: dict[Combination, int] = {}
    masks = [_mask(row, strength, numbers) for row in rows]
    missing = (1 << len(numbers)) - 1
    # A row's worth only falls, so what stood first with an old worth and stays first is the best.
    heap = [(-mask.bit_count(), index) for index, mask in enumerate(masks)]
    heapq.heapify(heap)
    chosen = []
    while missing:
        _, index = heapq.heappop(heap)
        entry = (-(masks[index] & missing).bit_count(), index)
        if heap and entry > heap[0]:
            heapq.heappush(heap, entry)
            continue
        chosen.append(rows[index])
        missing &= ~masks[index]
    return chosen


def combinations_of(rows: Iterable[Row], strength: int = 2) -> set[Combination]:
    """All combinations of `strength` values that occur in the rows."""
    return {found for row in rows for found in _combinations(row, strength)}


def _combinations(row: Row, strength: int) -> Iterator[Combination]:
    return combinations(tuple(enumerate(row)), strength)


def _mask(row: Row, strength: int, numbers: dict[Combination, int]) -> int:
    """The row's combinations as bits; those seen for the first time are numbered on."""
    mask = 0
    for found in _combinations(row, strength):
        mask |= 1 << numbers.setdefault(found, len(numbers))
    return mask
