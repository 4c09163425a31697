"""RMSNorm of y silu(gate) over the channels of each group, and its backward pass: each reads its
inputs once and computes in fp32.

b batch, l tokens, d channels, of which a group has `width`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 32
"""Tokens of a program of the backward pass, which adds up the weight's gradient over them."""


@triton.jit
def _gated(y_ptr, gate_ptr, columns, inside):
    """y, gate, sigmoid of the gate, and their product."""
    y = tl.load(y_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    return y, gate, sigmoid, y * gate * sigmoid


@triton.jit
def _forward(
    y_ptr, gate_ptr, weight_ptr, out_ptr, length, d, eps, width,
    gate_row, gate_batch, out_row, out_batch, block: tl.constexpr,
):  # fmt: skip
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    batch, place = row // length, row % length
    columns = tl.arange(0, block)
    inside = columns < width
    start = group * width
    gate_ptr += batch * gate_batch + place * gate_row + start
    _, _, _, gated = _gated(y_ptr + row * d + start, gate_ptr, columns, inside)
    scale = tl.rsqrt(tl.sum(gated * gated) / width + eps)
    weight = tl.load(weight_ptr + start + columns, mask=inside, other=0.0).to(tl.float32)
    out = (gated * scale * weight).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + batch * out_batch + place * out_row + start + columns, out, mask=inside)


@triton.jit
def _backward(
    grad_ptr, y_ptr, gate_ptr, weight_ptr, y_grad_ptr, gate_grad_ptr, weight_grad_ptr,
    tokens, length, d, eps, width, grad_row, grad_batch, gate_row, gate_batch, out_row, out_batch,
    rows: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """weight_grad: (blocks of tokens, d) fp32."""
    first, group = tl.program_id(0).to(tl.int64) * rows, tl.program_id(1)
    columns = tl.arange(0, block)
    inside = columns < width
    start = group * width
    weight = tl.load(weight_ptr + start + columns, mask=inside, other=0.0).to(tl.float32)
    weight_grad = tl.zeros((block,), tl.float32)
    for row in range(first, tl.minimum(first + rows, tokens)):
        batch, place = row // length, row % length
        of_gate = gate_ptr + batch * gate_batch + place * gate_row + start
        y, gate, sigmoid, gated = _gated(y_ptr + row * d + start, of_gate, columns, inside)
        scale = tl.rsqrt(tl.sum(gated * gated) / width + eps)
        normalised = gated * scale
        at = grad_ptr + batch * grad_batch + place * grad_row + start + columns
        grad = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        weight_grad += grad * normalised
        of_norm = grad * weight
        of_gated = scale * (of_norm - normalised * (tl.sum(of_norm * normalised) / width))
        y_grad = (of_gated * gate * sigmoid).to(y_grad_ptr.dtype.element_ty)
        tl.store(y_grad_ptr + row * d + start + columns, y_grad, mask=inside)
        gate_grad = of_gated * y * sigmoid * (1 + gate * (1 - sigmoid))
        out = gate_grad_ptr + batch * out_batch + place * out_row + start + columns
        tl.store(out, gate_grad.to(gate_grad_ptr.dtype.element_ty), mask=inside)
    tl.store(weight_grad_ptr + tl.program_id(0) * d + start + columns, weight_grad, mask=inside)


def norm_forward(
    y: Tensor, gate: Tensor, weight: Tensor, groups: int, eps: float, out: Tensor
) -> None:
    """Write the norm to out. y: (b, l, d) contiguous. gate, out: (b, l, d). weight: (d)."""
    b, length, d = y.shape
    width = d // groups
    _forward[(b * length, groups)](
        *(y, gate, weight, out, length, d, eps, width),
        *(gate.stride(1), gate.stride(0), out.stride(1), out.stride(0)),
        block=triton.next_power_of_2(width),
    )


def norm_backward(
    grad: Tensor,
    y: Tensor,
    gate: Tensor,
    weight: Tensor,
    groups: int,
    eps: float,
    gate_grad: Tensor,
) -> tuple[Tensor, Tensor]:
    """Gradients of y and weight; that of gate is written to gate_grad. All (b, l, d), y
    contiguous."""
    b, length, d = y.shape
    width, blocks = d // groups, triton.cdiv(b * length, ROWS)
    y_grad, weight_grad = torch.empty_like(y), y.new_empty((blocks, d), dtype=torch.float32)
    _backward[(blocks, groups)](
        *(grad, y, gate, weight, y_grad, gate_grad, weight_grad),
        *(b * length, length, d, eps, width, grad.stride(1), grad.stride(0)),
        *(gate.stride(1), gate.stride(0), gate_grad.stride(1), gate_grad.stride(0)),
        rows=ROWS,
        block=triton.next_power_of_2(width),
    )
    return y_grad, weight_grad.sum(0).to(weight.dtype)
