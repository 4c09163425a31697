"""A matrix product and its collective in pieces that travel a ring ("decomposition" in Wang et al.,
ASPLOS 2023).

While one piece of the sequence is multiplied the next is on its way between neighbours, so that all
but the first hop hide behind products.

s sequence, b batch, n ranks of the group; k and m sizes of the matrix."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import P2POp, ProcessGroup, Work

from trainyard.parallel.model import group_rank, group_size


def gathered_matmul(x: Tensor, matrix: Tensor, group: ProcessGroup) -> tuple[Tensor, Tensor]:
    """all_gather(x) @ matrix, and all_gather(x) itself.

    x: (s / n, b, k), matrix: (k, m). Returns (s, b, m), (s, b, k)."""
    size, rank, length = group_size(group), group_rank(group), x.shape[0]
    whole = x.new_empty(length * size, *x.shape[1:])
    y = x.new_empty(*whole.shape[:-1], matrix.shape[1])
    pieces, products = whole.split(length), y.split(length)
    pieces[rank].copy_(x)
    for step in range(size):
        here, coming = (rank + step) % size, (rank + step + 1) % size
        is_last = step == size - 1
        # Pieces go down the ring: rank r has r, then r + 1, ..., each from the rank above.
        moving = [] if is_last else _move(pieces[here], pieces[coming], -1, group)
        _multiply(pieces[here], matrix, products[here])
        _wait(moving)
    return y, whole


def scattered_matmul(x: Tensor, matrix: Tensor, group: ProcessGroup) -> Tensor:
    """reduce_scatter(x @ matrix). x: (s, b, k), matrix: (k, m). Returns (s / n, b, m).

    The sum of a piece is passed up the ring and grows by a summand at each rank: an order of its
    own for each piece, the same every time."""
    size, rank = group_size(group), group_rank(group)
    assert x.shape[0] % size == 0, (tuple(x.shape), size)
    pieces = x.contiguous().split(x.shape[0] // size)
    shape = (*pieces[0].shape[:-1], matrix.shape[1])
    total = x.new_empty(shape)
    _multiply(pieces[(rank - 1) % size], matrix, total)
    for step in range(1, size):
        summand, arriving = x.new_empty(shape), x.new_empty(shape)
        moving = _move(total, arriving, 1, group)
        _multiply(pieces[(rank - 1 - step) % size], matrix, summand)
        _wait(moving)
        total = arriving.add_(summand)
    return total


def _move(outgoing: Tensor, incoming: Tensor, by: int, group: ProcessGroup) -> list[Work]:
    """Begin to send to the rank `by` places on, and to receive from the one as far back."""
    size, rank = group_size(group), group_rank(group)
    operations = [
        P2POp(dist.isend, outgoing, group=group, group_peer=(rank + by) % size),
        P2POp(dist.irecv, incoming, group=group, group_peer=(rank - by) % size),
    ]
    return list(dist.batch_isend_irecv(operations))


def _wait(works: list[Work]) -> None:
    for work in works:
        work.wait()


def _multiply(x: Tensor, matrix: Tensor, out: Tensor) -> None:
    torch.mm(x.flatten(0, -2), matrix, out=out.flatten(0, -2))
