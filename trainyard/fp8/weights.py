"""Weights of 8 bits with a scale for each output channel, for models that are not trained.

int8: the product is in the dtype of the inputs, by the integers, which that holds exactly. fp8
(E4M3): on GPUs with products of 8 bits the inputs are cast too, each row by its own maximum;
elsewhere as int8. out, in: sizes of the matrix."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from trainyard.kernels.available import TRITON

Kind = Literal["int8", "fp8"]
LARGEST = {"int8": 127.0, "fp8": 448.0}
E4M3 = torch.float8_e4m3fn
MULTIPLE = 16
"""Sizes of a matrix that products of 8 bits take."""
FEW_ROWS = 64
"""That a kernel of ours multiplies faster than torch's."""
LEAST = 1e-12
"""Of a maximum that is divided by."""


class QuantizedWeight(NamedTuple):
    """values x scale is the matrix."""

    values: Tensor
    """(out, in) int8 or E4M3."""
    scale: Tensor
    """(out) fp32."""
    casts_inputs: bool = False
    """Whether bf16 inputs are cast to 8 bits too."""


def quantize(weight: Tensor, kind: Kind) -> QuantizedWeight:
    """The nearest 8-bit matrix, the largest value of each row kept."""
    exact = weight.float()
    scale = exact.abs().amax(dim=1).clamp(min=LEAST) / LARGEST[kind]
    scaled = exact / scale.unsqueeze(1)
    values = scaled.round().to(torch.int8) if kind == "int8" else scaled.to(E4M3)
    return QuantizedWeight(values, scale, _multiplies_in_fp8(values))


def quantized_linear(x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
    """x W^T + b. x: (..., in), fp32, bf16 or fp16. Returns (..., out)."""
    values, scale, casts_inputs = weight
    if casts_inputs and x.dtype == torch.bfloat16:
        out = _fp8_product(x, values, scale)
    else:
        out = _cast_product(x, values, scale)
    return out if bias is None else out + bias


@torch.library.custom_op("trainyard::product_of_cast_weights", mutates_args=())
def _cast_product(x: Tensor, values: Tensor, scale: Tensor) -> Tensor:
    """Opaque: torch 2.11 cannot compile a product of few rows with a matrix of integers that it
    casts."""
    return functional.linear(x, values.to(x.dtype)) * scale.to(x.dtype)


@_cast_product.register_fake
def _(x: Tensor, values: Tensor, scale: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], values.shape[0])


def _multiplies_in_fp8(values: Tensor) -> bool:
    """Whether the device multiplies this matrix by rows of 8 bits with scales of their own."""
    if values.dtype != E4M3 or not values.is_cuda:
        return False
    sized = all(size % MULTIPLE == 0 for size in values.shape)
    return sized and torch.cuda.get_device_capability(values.device) >= (9, 0)


def _cast_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows (r, in) in E4M3, and the scale of each, (r, 1) fp32."""
    scale = rows.abs().amax(dim=1, keepdim=True).float().clamp(min=LEAST) / LARGEST["fp8"]
    return (rows.float() / scale).to(E4M3), scale


@functools.cache
def _cast_rows_at_once() -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """`_cast_rows` in one kernel instead of five, for layers that are not compiled: prompts."""
    return torch.compile(_cast_rows, dynamic=True)


def _fp8_product(x: Tensor, values: Tensor, scale: Tensor) -> Tensor:
    cast_rows = _cast_rows if torch.compiler.is_compiling() else _cast_rows_at_once()
    cast, own = cast_rows(x.flatten(0, -2))
    out: Tensor = _product_of_rows(cast, values, own, scale, x.dtype)
    return out.view(*x.shape[:-1], -1)


@torch.library.custom_op("trainyard::fp8_product_of_rows", mutates_args=(), device_types="cuda")
def _product_of_rows(
    rows: Tensor, values: Tensor, row_scale: Tensor, scale: Tensor, dtype: torch.dtype
) -> Tensor:
    """Opaque: a compiler would make steps of few rows and of many two programs."""
    if TRITON and rows.shape[0] <= FEW_ROWS:
        from trainyard.kernels.few_rows import few_rows_kernel

        return few_rows_kernel(rows, values, row_scale, scale, dtype)
    return torch._scaled_mm(
        rows,
        values.t(),
        row_scale,
        scale.unsqueeze(0),
        out_dtype=dtype,
        use_fast_accum=True,
    )


@_product_of_rows.register_fake
def _(rows: Tensor, values: Tensor, row_scale: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return rows.new_empty(rows.shape[0], values.shape[0], dtype=dtype)
