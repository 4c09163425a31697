"""SwiGLU and its backward pass, in place of torch's operators over `silu(gate) * up`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 1024, 4


@triton.jit
def _forward(x_ptr, out_ptr, width, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    channels = tl.program_id(1) * block + tl.arange(0, block)
    inside = channels < width
    gate = tl.load(x_ptr + row * 2 * width + channels, mask=inside).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * width + width + channels, mask=inside).to(tl.float32)
    # Rounded as torch's two operators round.
    silu = (gate * tl.sigmoid(gate)).to(out_ptr.dtype.element_ty).to(tl.float32)
    out = (silu * up).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * width + channels, out, mask=inside)


@triton.jit
def _backward(grad_ptr, x_ptr, out_ptr, width, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    channels = tl.program_id(1) * block + tl.arange(0, block)
    inside = channels < width
    grad = tl.load(grad_ptr + row * width + channels, mask=inside).to(tl.float32)
    gate = tl.load(x_ptr + row * 2 * width + channels, mask=inside).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * width + width + channels, mask=inside).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    of_gate = grad * up * (sigmoid + silu * (1 - sigmoid))
    out = out_ptr + row * 2 * width + channels
    tl.store(out, of_gate.to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(out + width, (grad * silu).to(out_ptr.dtype.element_ty), mask=inside)


def swiglu_forward(x: Tensor) -> Tensor:
    """silu(gate) x up of x = [gate; up], (..., 2 f). Returns (..., f)."""
    x = x.contiguous()
    width = x.shape[-1] // 2
    out = x.new_empty(*x.shape[:-1], width)
    if out.numel():
        grid = (out.numel() // width, triton.cdiv(width, BLOCK))
        _forward[grid](x, out, width, block=BLOCK, num_warps=WARPS)
    return out


def swiglu_backward(grad: Tensor, x: Tensor) -> Tensor:
    """Gradient of x = [gate; up], (..., 2 f); grad: (..., f). Computed in fp32."""
    grad, x = grad.contiguous(), x.contiguous()
    width = grad.shape[-1]
    out = torch.empty_like(x)
    if not out.numel():
        return out
    _backward[(grad.numel() // width, triton.cdiv(width, BLOCK))](
        grad, x, out, width, block=BLOCK, num_warps=WARPS
    )
    return out
