"""Activations of an MLP, in place of torch's gelu and operators, and their backward pass, which
also adds its result up over the rows: the gradient of the bias in the product before. Each reads
its inputs once and computes in fp32.

x: (rows, width), contiguous."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, FORWARD_WARPS = 4096, 4
"""Elements of a program of the forward pass."""
ROWS, COLUMNS, BACKWARD_WARPS, STAGES = 2, 1024, 4, 3
"""Rows and columns that a program of the backward pass has at a time, and such tiles on their way.
"""

LOG2_E = tl.constexpr(1.4426950408889634)
TANH_SCALE = tl.constexpr(1.5957691216057308)  # 2 sqrt(2 / pi)
TANH_CUBE = tl.constexpr(0.044715)
QUICK_SCALE = tl.constexpr(1.702)
LARGE = tl.constexpr(2.0**126)  # times 0 it is 0, which infinity is not
DENSITY = tl.constexpr(0.3989422804014327)  # 1 / sqrt(2 pi)


@triton.jit
def _normal(x):
    """exp(-x^2 / 2), and that times R(|x|): the normal distribution below -|x|.

    R is a polynomial in t = 1 / (1 + 0.305 |x|) without a constant term, off by at most 1e-7 of its
    value everywhere. 1 + erf(x / sqrt(2)) has no digits left below -5."""
    grown = 1.0 + 0.305 * tl.abs(x)
    t = tl.rsqrt(grown * grown)  # two instructions; 1 / grown takes seven
    r = 0.0366986482
    r = r * t - 0.152986141
    r = r * t + 0.185713276
    r = r * t - 0.0379735713
    r = r * t + 0.121019967
    r = r * t + 0.103421394
    r = r * t + 0.122466732
    r = r * t + 0.121639742
    bell = tl.exp2(x * x * (-0.5 * LOG2_E))
    return bell, bell * (r * t)


@triton.jit
def _sigmoid(power):
    """Sigmoid of power / log2(e), and its derivative, both without cancellation."""
    fall = tl.exp2(-power)
    gate = 1.0 / (1.0 + fall)
    return gate, tl.minimum(fall, LARGE) * gate * gate


@triton.jit
def _tanh_power(x):
    """(1 + tanh(u)) / 2 of the tanh form is the sigmoid of 2 u: that, for `_sigmoid`."""
    return x * (TANH_SCALE * LOG2_E + (TANH_SCALE * LOG2_E * TANH_CUBE) * (x * x))


@triton.jit
def _activated(x, kind: tl.constexpr):
    positive = tl.where(x < 0, 0.0, x)  # keeps what is not a number
    if kind == "gelu":
        _, tail = _normal(x)
        y = positive - tl.abs(x) * tail
    elif kind == "gelu_tanh":
        gate, _ = _sigmoid(_tanh_power(x))
        y = x * gate
    elif kind == "quick_gelu":
        gate, _ = _sigmoid(x * (QUICK_SCALE * LOG2_E))
        y = x * gate
    else:
        tl.static_assert(kind == "squared_relu")
        y = positive * positive
    return y


@triton.jit
def _slope(x, kind: tl.constexpr):
    if kind == "gelu":
        bell, tail = _normal(x)
        slope = tl.where(x < 0, tail, 1.0 - tail) + x * (bell * DENSITY)
    elif kind == "gelu_tanh":
        gate, of_gate = _sigmoid(_tanh_power(x))
        inner = TANH_SCALE + (3.0 * TANH_SCALE * TANH_CUBE) * (x * x)
        slope = gate + x * of_gate * inner
    elif kind == "quick_gelu":
        gate, of_gate = _sigmoid(x * (QUICK_SCALE * LOG2_E))
        slope = gate + QUICK_SCALE * x * of_gate
    else:
        tl.static_assert(kind == "squared_relu")
        slope = tl.where(x < 0, 0.0, 2.0 * x)
    return slope


@triton.jit
def _forward(x_ptr, out_ptr, count, kind: tl.constexpr, block: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = at < count
    x = tl.load(x_ptr + at, mask=inside).to(tl.float32)
    tl.store(out_ptr + at, _activated(x, kind).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    grad_ptr, x_ptr, out_ptr, sums_ptr, num_rows, width,
    kind: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr, stages: tl.constexpr,
):  # fmt: skip
    """Program (c, p) of P: a block of columns, and of the row blocks each P-th from p on."""
    channels = tl.program_id(0) * columns + tl.arange(0, columns)
    part, parts = tl.program_id(1), tl.num_programs(1)
    is_channel = channels < width
    total = tl.zeros((columns,), tl.float32)
    for first in tl.range(part * rows, num_rows, parts * rows, num_stages=stages):
        row = first + tl.arange(0, rows)
        at = row.to(tl.int64)[:, None] * width + channels[None, :]
        inside = (row < num_rows)[:, None] & is_channel[None, :]
        grad = tl.load(grad_ptr + at, mask=inside, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
        of_x = grad * _slope(x, kind)
        tl.store(out_ptr + at, of_x.to(out_ptr.dtype.element_ty), mask=inside)
        total += tl.sum(of_x, 0)
    tl.store(sums_ptr + part.to(tl.int64) * width + channels, total, mask=is_channel)


def activation_forward(x: Tensor, kind: str) -> Tensor:
    """The activation of x, which may have any shape."""
    x = x.contiguous()
    out = torch.empty_like(x)
    if x.numel():
        grid = (triton.cdiv(x.numel(), BLOCK),)
        _forward[grid](x, out, x.numel(), kind=kind, block=BLOCK, num_warps=FORWARD_WARPS)
    return out


def activation_backward(grad: Tensor, x: Tensor, kind: str, parts: int) -> tuple[Tensor, Tensor]:
    """Gradient of x, and (parts, width) fp32: that, before it is rounded, added up over the rows
    of each part."""
    grad, x = grad.contiguous(), x.contiguous()
    width = x.shape[-1]
    out, sums = torch.empty_like(x), x.new_empty((parts, width), dtype=torch.float32)
    if x.numel():
        _backward[(triton.cdiv(width, COLUMNS), parts)](
            *(grad, x, out, sums, x.numel() // width, width),
            kind=kind,
            rows=ROWS,
            columns=COLUMNS,
            stages=STAGES,
            num_warps=BACKWARD_WARPS,
        )
    return out, sums
