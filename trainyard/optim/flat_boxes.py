"""A run of numbers of a flattened tensor as boxes of the tensor. Pure arithmetic.

A rank of the distributed optimizer owns flat ranges that begin and end anywhere in a parameter;
checkpoints know boxes. In row-major order a range of an n-dimensional tensor is at most 2 n - 1
boxes: a rest of a row, whole rows, the beginning of a row, and so within those rows."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Box:
    """Numbers that lie together in a tensor, and one behind the other when it is flattened."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Numbers in it."""
        return math.prod(self.shape)


def boxes_of_range(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """The boxes that make up the flat range, in its order."""
    assert 0 <= start <= stop <= math.prod(shape), (shape, start, stop)
    if start == stop:
        return
    if len(shape) <= 1:
        yield Box((start,) * len(shape), (stop - start,) * len(shape))
        return
    row = math.prod(shape[1:])
    first_whole, end_whole = -(-start // row), stop // row
    if first_whole > end_whole:  # within one row
        yield from _in_row(shape, end_whole, start - end_whole * row, stop - end_whole * row)
        return
    if start < first_whole * row:
        yield from _in_row(shape, first_whole - 1, start - (first_whole - 1) * row, row)
    if first_whole < end_whole:
        rest = len(shape) - 1
        yield Box((first_whole, *(0,) * rest), (end_whole - first_whole, *shape[1:]))
    if end_whole * row < stop:
        yield from _in_row(shape, end_whole, 0, stop - end_whole * row)


def _in_row(shape: tuple[int, ...], index: int, start: int, stop: int) -> Iterator[Box]:
    for box in boxes_of_range(shape[1:], start, stop):
        yield Box((index, *box.offset), (1, *box.shape))
