"""The backward pass of SwiGLU, in place of autograd's over `silu(gate) * up`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 1024, 4


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


def swiglu_backward(grad: Tensor, x: Tensor) -> Tensor:
    """Gradient of x = [gate; up], (..., 2 f); grad: (..., f). Computed in fp32."""
    grad, x = grad.contiguous(), x.contiguous()
    width = grad.shape[-1]
    out = torch.empty_like(x)
    _backward[(grad.numel() // width, triton.cdiv(width, BLOCK))](
        grad, x, out, width, block=BLOCK, num_warps=WARPS
    )
    return out
