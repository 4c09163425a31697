"""Products of rows with the matrix of their expert, behind one signature.

r rows in the order of their experts, e experts, "in" and "out" channels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from trainyard.fp8.delayed import DelayedScaling
from trainyard.fp8.recipe import Fp8Recipe
from trainyard.parallel.tensor.fp8_linear import fp8_linear

ALIGNMENT = 8
"""Channels in 16 bits that make up the 16 bytes at which the kernel wants rows to begin."""
HOPPER = (9, 0)
"""Compute capability of the devices that have the kernel."""


def grouped_linear(rows: Tensor, weight: Tensor, counts: Tensor, *, fused: bool) -> Tensor:
    """rows W^T with the W of each row's expert.

    rows: (r, in); weight: (e, out, in); counts: (e) int64, rows of each expert. fused: in one
    kernel where `is_fusible`. Returns (r, out)."""
    if fused and is_fusible(rows, weight):
        offsets = counts.cumsum(0).to(torch.int32)
        y: Tensor = _Grouped.apply(rows, weight, offsets)  # type: ignore[no-untyped-call]
        return y
    return looped_linear(rows, weight, counts)


def looped_linear(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """The reference: one expert after the other. Waits for the device to learn the counts."""
    parts = rows.split(counts.tolist())
    products = [functional.linear(x, w) for x, w in zip(parts, weight.unbind(0), strict=True)]
    return torch.cat(products)


def fp8_grouped_linear(
    rows: Tensor,
    weight: Tensor,
    counts: Tensor,
    recipe: Fp8Recipe,
    delayed: DelayedScaling | None = None,
    first: int = 0,
) -> Tensor:
    """As `grouped_linear`, each expert a linear map in 8 bits with scales of its own. Waits for the
    device to learn the counts.

    delayed: scales of all experts of the layer, of which the first here is number `first`."""
    products = []
    pairs = zip(rows.split(counts.tolist()), weight.unbind(0), strict=True)
    for number, (part, matrix) in enumerate(pairs, first):
        if not len(part):  # in 16 bits, which gives its matrix a gradient of zeros
            products.append(functional.linear(part, matrix))
            continue
        # The product for the gradient of the weight sums over the rows. Zeros change no maximum.
        padded = functional.pad(part, (0, 0, 0, -len(part) % recipe.alignment))
        products.append(fp8_linear(padded, matrix, None, recipe, delayed, number)[: len(part)])
    return torch.cat(products)


def is_fusible(rows: Tensor, weight: Tensor) -> bool:
    """Whether the kernel takes these: bf16 on a Hopper GPU or a later one, aligned rows."""
    return (
        rows.is_cuda
        and rows.dtype == weight.dtype == torch.bfloat16
        and not any(size % ALIGNMENT for size in weight.shape[1:])
        and torch.cuda.get_device_capability(rows.device) >= HOPPER
    )


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weight, offsets)
        return torch._grouped_mm(rows, weight.transpose(1, 2), offs=offsets)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        rows, weight, offsets = ctx.saved_tensors
        grad = grad.contiguous()
        needs_rows, needs_weight = ctx.needs_input_grad[:2]
        of_rows = torch._grouped_mm(grad, weight, offs=offsets) if needs_rows else None
        of_weight = torch._grouped_mm(grad.t(), rows, offs=offsets) if needs_weight else None
        return of_rows, of_weight, None
