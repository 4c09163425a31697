"""Matrix products of tensor parallelism with their communication hidden behind them.

The backward of a column-parallel product always hides it: the input is gathered behind the product
for the input's gradient, and that is added up over the ranks behind the product for the weight's.
Where there is one product only (both forwards, and the row-parallel backward), `tp_comm_overlap`
splits it into as many pieces as ranks, which travel a ring: while one piece of the sequence is
multiplied the next is on its way, so that all but the first hop hide behind products.

On CUDA the communication has to be begun before the product that hides it, which the hardware's
queues keep to with CUDA_DEVICE_MAX_CONNECTIONS=1.

s sequence, b batch, n tensor-parallel ranks; "in" and "out", k and m: sizes of the
whole matrix."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import P2POp, ProcessGroup, Work
from torch.nn import functional

from trainyard.parallel.model import ModelParallel, group_rank, group_size
from trainyard.parallel.tensor.collectives import (
    all_gather,
    finish,
    group_called,
    start_all_gather,
    start_all_reduce_of_own,
    start_reduce_scatter,
)


def column_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, parallel: ModelParallel
) -> Tensor:
    """x W^T + b for W cut by rows; the gradient of x is added up over the ranks.

    x: (s, b, in), (s / n, b, in) under sequence parallelism. Returns (s, b, out / n)."""
    if parallel.tp is None:
        return functional.linear(x, weight, bias)
    y: Tensor = _ColumnLinear.apply(  # type: ignore[no-untyped-call]
        x, weight, bias, parallel.tp, parallel.sequence_parallel, parallel.tp_comm_overlap
    )
    return y


def row_linear(x: Tensor, weight: Tensor, parallel: ModelParallel) -> Tensor:
    """x W^T for W cut by columns, added up over the ranks, in pieces of the sequence.

    x: (s, b, in / n). Returns (s / n, b, out); only under sequence parallelism."""
    assert parallel.tp is not None
    y: Tensor = _RowLinear.apply(x, weight, parallel.tp)  # type: ignore[no-untyped-call]
    return y


class _ColumnLinear(torch.autograd.Function):
    """Keeps its part of the input, not the gathered whole (arXiv:2205.05198, section 4.2.2)."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        group: ProcessGroup,
        sequence_parallel: bool,
        overlap: bool,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group, ctx.sequence_parallel = group, sequence_parallel
        if sequence_parallel and overlap:
            y = _gathered_matmul(x, weight.t(), group)[0]
            return y if bias is None else y.add_(bias)
        return functional.linear(all_gather(x, group) if sequence_parallel else x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        arguments = (grad, x, weight, ctx.group.group_name, ctx.sequence_parallel)
        if torch.compiler.is_compiling():
            grad_x, grad_weight = _column_backward_op(*arguments, needs_x, needs_weight)
        else:
            grad_x, grad_weight = _column_backward(*arguments, needs_x, needs_weight)
        return (
            grad_x if needs_x else None,
            grad_weight if needs_weight else None,
            grad.flatten(0, -2).sum(0) if needs_bias else None,
            *(None, None, None),
        )


def _column_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    group_name: str,
    sequence_parallel: bool,
    needs_x: bool,
    needs_weight: bool,
) -> tuple[Tensor, Tensor]:
    """Gradients of x and W; one that is not needed is empty."""
    group = group_called(group_name)
    grad_x, grad_weight = grad.new_empty(0), grad.new_empty(0)
    gathering = start_all_gather(x, group) if sequence_parallel and needs_weight else None
    if needs_x:
        grad_x = grad @ weight
    if gathering is not None:
        x = finish(gathering)
    if needs_x:
        start = start_reduce_scatter if sequence_parallel else start_all_reduce_of_own
        grad_x = start(grad_x, group)
    if needs_weight:
        grad_weight = weight_gradient(grad, x)
    return (finish(grad_x) if needs_x else grad_x), grad_weight


# Under a compiler the backward is one opaque operation. Else it would find that forward and
# backward gather the same input, gather it once, and keep the whole from one to the other.
_column_backward_op = torch.library.custom_op(
    "trainyard::column_linear_backward", _column_backward, mutates_args=()
)


@_column_backward_op.register_fake
def _(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    group_name: str,
    sequence_parallel: bool,
    needs_x: bool,
    needs_weight: bool,
) -> tuple[Tensor, Tensor]:
    return (
        grad.new_empty(x.shape if needs_x else (0,)),
        grad.new_empty(weight.shape if needs_weight else (0,)),
    )


class _RowLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, group: ProcessGroup) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group = group
        return _scattered_matmul(x, weight.t(), group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        grad_x, whole = _gathered_matmul(grad, weight, ctx.group)
        needs_weight = ctx.needs_input_grad[1]
        return grad_x, weight_gradient(whole, x) if needs_weight else None, None


def weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """Gradient of W of x W^T. grad: (..., out), x: (..., in). Returns (out, in)."""
    return grad.flatten(0, -2).t() @ x.flatten(0, -2)


# --- rings: a product and its collective in pieces ("decomposition" in Wang et al., ASPLOS 2023) --


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


# A compiler takes each ring as one operation.


def _gathered_matmul(x: Tensor, matrix: Tensor, group: ProcessGroup) -> tuple[Tensor, Tensor]:
    if torch.compiler.is_compiling():
        y, whole = _gathered_matmul_op(x, matrix, group.group_name, group_size(group))
        return y, whole
    return gathered_matmul(x, matrix, group)


def _scattered_matmul(x: Tensor, matrix: Tensor, group: ProcessGroup) -> Tensor:
    if torch.compiler.is_compiling():
        scattered: Tensor = _scattered_matmul_op(x, matrix, group.group_name, group_size(group))
        return scattered
    return scattered_matmul(x, matrix, group)


@torch.library.custom_op("trainyard::gathered_matmul", mutates_args=())
def _gathered_matmul_op(
    x: Tensor, matrix: Tensor, group_name: str, size: int
) -> tuple[Tensor, Tensor]:
    return gathered_matmul(x, matrix, group_called(group_name))


@_gathered_matmul_op.register_fake
def _(x: Tensor, matrix: Tensor, group_name: str, size: int) -> tuple[Tensor, Tensor]:
    length = x.shape[0] * size
    whole = x.new_empty(length, *x.shape[1:])
    return x.new_empty(length, *x.shape[1:-1], matrix.shape[1]), whole


@torch.library.custom_op("trainyard::scattered_matmul", mutates_args=())
def _scattered_matmul_op(x: Tensor, matrix: Tensor, group_name: str, size: int) -> Tensor:
    return scattered_matmul(x, matrix, group_called(group_name))


@_scattered_matmul_op.register_fake
def _(x: Tensor, matrix: Tensor, group_name: str, size: int) -> Tensor:
    return x.new_empty(x.shape[0] // size, *x.shape[1:-1], matrix.shape[1])
