"""State tensors of the optimizer by global name, for whoever saves and restores them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from trainyard.optim.flat_boxes import Box, boxes_of_range
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
    dim = shard.dim
    begin, end = box.offset[dim], box.offset[dim] + box.shape[dim]
    for piece in shard.pieces:
        first, last = max(begin, piece.local), min(end, piece.local + piece.length)
        if first < last:
            offset = list(box.offset)
            offset[dim] = piece.whole + first - piece.local
            inner = view.narrow(dim, first - begin, last - first)
            yield StateBox(name, inner, shard.shape, tuple(offset))
