"""State tensors of the optimizer by global name, as boxes that checkpoints save and restore.

A rank of the distributed optimizer owns flat ranges that begin and end anywhere in a parameter;
checkpoints know boxes. In row-major order a range of an n-dimensional tensor is at most 2 n - 1
boxes: a rest of a row, whole rows, the beginning of a row, and so within those rows."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from torch import Tensor

from trainyard.parallel.sharding import Shard


@dataclass(frozen=True, slots=True)
class StateBox:
    """A box of a global tensor: `tensor`, a view of live memory, begins at `offset`.

    To save, read it; to restore, write into it."""

    name: str
    tensor: Tensor
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]


def state_boxes(
    name: str,
    flat: Tensor,
    start: int,
    local_shape: tuple[int, ...],
    shard: Shard | None,
) -> Iterator[StateBox]:
    """The boxes of a flat tensor that holds the numbers from `start` on of a parameter.

    The parameter has `local_shape` and is the part `shard` of a whole, or the whole."""
    begin = 0
    for box in boxes_of_range(local_shape, start, start + flat.numel()):
        view = flat[begin : begin + box.size].view(box.shape)
        begin += box.size
        if shard is None:
            yield StateBox(name, view, local_shape, box.offset)
        else:
            yield from _in_whole(name, view, box, shard)


def _in_whole(name: str, view: Tensor, box: Box, shard: Shard) -> Iterator[StateBox]:
    """A box of the part, as boxes of the whole: it may reach over pieces that lie apart there."""
    for pieces in product(*(cut.pieces for cut in shard.cuts)):
        offset, inner = list(box.offset), view
        for cut, piece in zip(shard.cuts, pieces, strict=True):
            begin, end = box.offset[cut.dim], box.offset[cut.dim] + box.shape[cut.dim]
            first, last = max(begin, piece.local), min(end, piece.local + piece.length)
            if first >= last:
                break
            offset[cut.dim] = piece.whole + first - piece.local
            inner = inner.narrow(cut.dim, first - begin, last - first)
        else:
            yield StateBox(name, inner, shard.shape, tuple(offset))


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
