"""Pairwise testing: a few of many combinations, in which every pair of values occurs.

Most faults of options come from one of them or from two together (Kuhn, Wallace, Gallo, IEEE TSE
30(6), 2004). So a selection in which every pair of values occurs finds nearly all faults that the
whole cross product would. Pure functions."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import combinations, product
from typing import Any

Row = tuple[Hashable, ...]
"""One value of every factor, in a fixed order."""

Combination = tuple[tuple[int, Hashable], ...]
"""Values of some factors, each with the index of its factor."""


def cross(
    factors: Mapping[str, Sequence[Hashable]],
    is_valid: Callable[[Mapping[str, Any]], bool] = lambda row: True,
) -> list[Row]:
    """All combinations of the factors' values that are valid, the last factor moving fastest."""
    names = list(factors)
    rows = product(*factors.values())
    return [row for row in rows if is_valid(dict(zip(names, row, strict=True)))]


def covering_rows(rows: Sequence[Row], strength: int = 2) -> list[Row]:
    """A small selection of `rows` with every combination of `strength` values that occurs in them.

    A combination that occurs in no row, such as an invalid pair, is not required. Greedy: each next
    row has the most combinations that are still missing, and is the first of several such rows. The
    result is larger than the smallest selection by a logarithmic factor at most, in practice by a
    few rows."""
    numbers: dict[Combination, int] = {}
    masks = [_mask(row, strength, numbers) for row in rows]
    missing = (1 << len(numbers)) - 1
    # The gain of a row never grows, so a row whose updated gain is still the first is the best.
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
    """The row's combinations as bits; new ones get the next numbers."""
    mask = 0
    for found in _combinations(row, strength):
        mask |= 1 << numbers.setdefault(found, len(numbers))
    return mask
