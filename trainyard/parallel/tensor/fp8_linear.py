"""Linear maps whose three products (forward, and the gradients of input and weight) are in 8 bits.

Input, weight and gradient are each cast once, in both layouts; for the backward pass the input is
kept in 8 bits, half the bytes of bf16. Under tensor parallelism a rank scales the part of a tensor
that it has by the maximum of that, so results differ from one rank's by the rounding of 8 bits;
blockwise, each number has the scale that it has on one rank, but for the input projection of a
Mamba layer: it is of several parts, each cut, and blocks that lie in two differ."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from trainyard.fp8.backends import KERNELS
from trainyard.fp8.cast import FORWARD, WIDE, Fp8Pair, amax_of
from trainyard.fp8.delayed import TENSORS, DelayedScaling, known_or_own
from trainyard.fp8.recipe import Backend, Fp8Recipe, Recipe
from trainyard.fp8.rowwise import cast_rows
from trainyard.parallel.model import ModelParallel
from trainyard.parallel.tensor.collectives import (
    all_gather,
    finish,
    group_called,
    start_all_reduce_of_own,
    start_reduce_scatter,
)


def fp8_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    recipe: Fp8Recipe,
    delayed: DelayedScaling | None = None,
    number: int = 0,
) -> Tensor:
    """x W^T + b on this rank alone. x: (..., in), weight: (out, in). Returns (..., out). delayed:
    scales of past steps; None: by the tensors themselves. number: which of its maps this is."""
    scaling = (None, None) if delayed is None else delayed.of_map(number)
    y: Tensor = _Fp8Linear.apply(  # type: ignore[no-untyped-call]
        *(x, weight, bias, recipe.scaling, recipe.format == "hybrid", recipe.backend, *scaling),
    )
    return y


def fp8_column_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    recipe: Fp8Recipe,
    parallel: ModelParallel,
    delayed: DelayedScaling | None = None,
) -> Tensor:
    """x W^T + b for W cut by rows; the gradient of x is added up over the ranks.

    x: (s, b, in), (s / n, b, in) under sequence parallelism. Returns (s, b, out / n)."""
    if parallel.tp is None:
        return fp8_linear(x, weight, bias, recipe, delayed)
    scaling = (None, None) if delayed is None else delayed.of_map(0)
    y: Tensor = _Fp8ColumnLinear.apply(  # type: ignore[no-untyped-call]
        *(x, weight, bias, recipe.scaling, recipe.format == "hybrid", recipe.backend, *scaling),
        *(parallel.tp, parallel.sequence_parallel),
    )
    return y


INPUT, WEIGHT, GRADIENT = range(TENSORS)
"""Their places in what delayed scaling keeps."""


def _cast(
    x: Tensor,
    dtype: torch.dtype,
    scaling: Recipe,
    backend: Backend,
    scales: Tensor | None,
    which: int,
) -> tuple[Fp8Pair, Tensor | None]:
    """The tensor in 8 bits and, with delayed scaling, its maximum."""
    kernels = KERNELS[backend]
    if scaling == "blockwise":
        return (kernels.cast_blocks if which == WEIGHT else kernels.cast_tiles)(x, dtype), None
    if scaling == "rowwise":
        return cast_rows(x, dtype), None
    if scales is None:
        return kernels.cast_pair(x, dtype), None
    largest = amax_of(x)
    scale = known_or_own(scales[which], largest, dtype)
    return kernels.cast_scaled(x, scale, dtype), largest


def _forward(
    ctx: Any,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scaling: Recipe,
    hybrid: bool,
    backend: Backend,
    scales: Tensor | None,
) -> Tensor:
    """The product; keeps what the backward pass needs."""
    left, largest_x = _cast(x.flatten(0, -2), FORWARD, scaling, backend, scales, INPUT)
    right, largest_weight = _cast(weight, FORWARD, scaling, backend, scales, WEIGHT)
    operands = (left.rows, right.rows, left.row_scale, right.row_scale)
    y = KERNELS[backend].scaled_product(*operands, x.dtype, bias=bias, fast=True)
    ctx.save_for_backward(
        *(left.columns, left.column_scale, right.columns, right.column_scale),
        *(scales, largest_x, largest_weight),
    )
    ctx.scaling, ctx.backend = scaling, backend
    ctx.grad_dtype = WIDE if hybrid else FORWARD
    return y.view(*x.shape[:-1], weight.shape[0])


def _input_gradient(
    grad: Fp8Pair, weight: Tensor, scale: Tensor, dtype: torch.dtype, backend: Backend
) -> Tensor:
    """grad W. weight: (in, out). Returns (m, in)."""
    return KERNELS[backend].scaled_product(grad.rows, weight, grad.row_scale, scale, dtype)


def _weight_gradient(
    grad: Fp8Pair, x: Tensor, scale: Tensor, dtype: torch.dtype, backend: Backend
) -> Tensor:
    """grad^T x. x: (in, m). Returns (out, in)."""
    return KERNELS[backend].scaled_product(grad.columns, x, grad.column_scale, scale, dtype)


class _Fp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        scaling: Recipe,
        hybrid: bool,
        backend: Backend,
        scales: Tensor | None,
        probe: Tensor | None,
    ) -> Tensor:
        return _forward(ctx, x, weight, bias, scaling, hybrid, backend, scales)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, x_scale, weight, weight_scale, scales, largest_x, largest_weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        flat = grad.flatten(0, -2)
        how = (ctx.grad_dtype, ctx.scaling, ctx.backend)
        pair, largest_grad = _cast(flat, *how, scales, GRADIENT)
        grad_x = grad_weight = None
        if needs_x:
            grad_x = _input_gradient(pair, weight, weight_scale, grad.dtype, ctx.backend)
            grad_x = grad_x.view(*grad.shape[:-1], weight.shape[0])
        if needs_weight:
            grad_weight = _weight_gradient(pair, x, x_scale, grad.dtype, ctx.backend)
        return (
            *(grad_x, grad_weight, flat.sum(0) if needs_bias else None),
            *(None, None, None, None, _maxima(largest_x, largest_weight, largest_grad)),
        )


class _Fp8ColumnLinear(torch.autograd.Function):
    """The gradient of the input is added up over the ranks behind the product for the weight's."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        scaling: Recipe,
        hybrid: bool,
        backend: Backend,
        scales: Tensor | None,
        probe: Tensor | None,
        group: ProcessGroup,
        sequence_parallel: bool,
    ) -> Tensor:
        ctx.group, ctx.sequence_parallel = group, sequence_parallel
        whole = all_gather(x, group) if sequence_parallel else x
        return _forward(ctx, whole, weight, bias, scaling, hybrid, backend, scales)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, x_scale, weight, weight_scale, scales, largest_x, largest_weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        flat = grad.flatten(0, -2)
        how = (ctx.grad_dtype, ctx.scaling, ctx.backend)
        pair, largest_grad = _cast(flat, *how, scales, GRADIENT)
        arguments = (
            *(*pair, x, x_scale, weight, weight_scale),
            *(grad.shape[0], ctx.group.group_name, ctx.sequence_parallel, needs_x, needs_weight),
            *(grad.dtype, ctx.backend),
        )
        backward = _column_backward_op if torch.compiler.is_compiling() else _column_backward
        grad_x, grad_weight = backward(*arguments)
        return (
            grad_x if needs_x else None,
            grad_weight if needs_weight else None,
            flat.sum(0) if needs_bias else None,
            *(None, None, None, None, _maxima(largest_x, largest_weight, largest_grad)),
            *(None, None),
        )


def _maxima(x: Tensor | None, weight: Tensor | None, grad: Tensor | None) -> Tensor | None:
    """What the probe gets; None without delayed scaling."""
    if x is None or weight is None or grad is None:
        return None
    return torch.stack([x, weight, grad])


def _column_backward(
    grad_rows: Tensor,
    grad_columns: Tensor,
    grad_scale: Tensor,
    grad_column_scale: Tensor,
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    length: int,
    group_name: str,
    sequence_parallel: bool,
    needs_x: bool,
    needs_weight: bool,
    dtype: torch.dtype,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """Gradients of x, (s, b, in) or its part, and of W; one that is not needed is empty."""
    group, of = group_called(group_name), cast(Backend, backend)
    pair = Fp8Pair(grad_rows, grad_columns, grad_scale, grad_column_scale)
    # Two tensors: what a custom operator returns must not share memory.
    grad_x, grad_weight = grad_scale.new_empty(0, dtype=dtype), grad_scale.new_empty(0, dtype=dtype)
    if needs_x:
        grad_x = _input_gradient(pair, weight, weight_scale, dtype, of)
        grad_x = grad_x.view(length, -1, weight.shape[0])
        start = start_reduce_scatter if sequence_parallel else start_all_reduce_of_own
        grad_x = start(grad_x, group)
    if needs_weight:
        grad_weight = _weight_gradient(pair, x, x_scale, dtype, of)
    return (finish(grad_x) if needs_x else grad_x), grad_weight


# One operation for a compiler, so that it keeps the order of communication and products.
_column_backward_op = torch.library.custom_op(
    "trainyard::fp8_column_linear_backward", _column_backward, mutates_args=()
)


@_column_backward_op.register_fake
def _(
    grad_rows: Tensor,
    grad_columns: Tensor,
    grad_scale: Tensor,
    grad_column_scale: Tensor,
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    length: int,
    group_name: str,
    sequence_parallel: bool,
    needs_x: bool,
    needs_weight: bool,
    dtype: torch.dtype,
    backend: str,
) -> tuple[Tensor, Tensor]:
    size = group_called(group_name).size() if sequence_parallel else 1
    features, tokens = x.shape
    shape_x = (length // size, tokens // length, features) if needs_x else (0,)
    shape_w = (grad_rows.shape[1], features) if needs_weight else (0,)
    return grad_scale.new_empty(shape_x, dtype=dtype), grad_scale.new_empty(shape_w, dtype=dtype)
