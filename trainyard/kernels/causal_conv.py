"""A short causal convolution of each channel with SiLU behind it, and its backward pass: each reads
its inputs once, where torch's operators make a tensor for every tap."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TOKENS, CHANNELS, WARPS = 64, 64, 4


@triton.jit
def _before(x_ptr, documents_ptr, places, back: tl.constexpr, columns, inside, row, length,
            documented: tl.constexpr):  # fmt: skip
    """fp32 inputs so many tokens before places; 0 before the first and of other documents."""
    there = (places >= back) & (places < length)
    if documented and back > 0:
        own = tl.load(documents_ptr + places, mask=there, other=-1)
        there = there & (own == tl.load(documents_ptr + places - back, mask=there, other=-2))
    at = x_ptr + (places - back)[:, None] * row + columns[None, :]
    return tl.load(at, mask=there[:, None] & inside[None, :], other=0.0).to(tl.float32)


@triton.jit
def _sums(x_ptr, weight_ptr, bias_ptr, documents_ptr, places, columns, inside, row, length,
          width: tl.constexpr, documented: tl.constexpr):  # fmt: skip
    """What enters SiLU."""
    bias = tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    out = tl.zeros((places.shape[0], columns.shape[0]), tl.float32) + bias[None, :]
    for back in tl.static_range(width):
        tap = tl.load(weight_ptr + columns * width + width - 1 - back, mask=inside, other=0.0)
        x = _before(x_ptr, documents_ptr, places, back, columns, inside, row, length, documented)
        out += tap.to(tl.float32)[None, :] * x
    return out


@triton.jit
def _forward(
    x_ptr, weight_ptr, bias_ptr, documents_ptr, out_ptr, length, channels, row, batch_stride,
    width: tl.constexpr, tokens: tl.constexpr, block: tl.constexpr, documented: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(2).to(tl.int64)
    places = tl.program_id(0) * tokens + tl.arange(0, tokens)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    inside = columns < channels
    sums = _sums(
        x_ptr + batch * batch_stride, weight_ptr, bias_ptr, documents_ptr + batch * length,
        places, columns, inside, row, length, width, documented,
    )  # fmt: skip
    out = out_ptr + (batch * length + places[:, None]) * channels + columns[None, :]
    mask = (places < length)[:, None] & inside[None, :]
    tl.store(out, (sums * tl.sigmoid(sums)).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _backward(
    grad_ptr, x_ptr, weight_ptr, bias_ptr, documents_ptr, x_grad_ptr, taps_grad_ptr,
    length, channels, row, batch_stride,
    width: tl.constexpr, tokens: tl.constexpr, block: tl.constexpr, documented: tl.constexpr,
):  # fmt: skip
    """taps_grad: (b, blocks of tokens, width + 1, channels) fp32, of the taps and the bias."""
    batch = tl.program_id(2).to(tl.int64)
    places = tl.program_id(0) * tokens + tl.arange(0, tokens)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    inside = columns < channels
    x_ptr += batch * batch_stride
    grad_ptr += batch * length * channels
    documents_ptr += batch * length
    x_grad = tl.zeros((tokens, block), tl.float32)
    taps_grad_ptr += (batch * tl.num_programs(0) + tl.program_id(0)) * (width + 1) * channels
    for ahead in tl.static_range(width):
        later = places + ahead
        sums = _sums(
            x_ptr, weight_ptr, bias_ptr, documents_ptr, later, columns, inside, row, length, width,
            documented,
        )  # fmt: skip
        there = later < length
        at = grad_ptr + later[:, None] * channels + columns[None, :]
        grad = tl.load(at, mask=there[:, None] & inside[None, :], other=0.0).to(tl.float32)
        sigmoid = tl.sigmoid(sums)
        grad *= sigmoid * (1 + sums * (1 - sigmoid))
        if ahead == 0:
            tl.store(taps_grad_ptr + width * channels + columns, tl.sum(grad, 0), mask=inside)
            for back in tl.static_range(width):
                x = _before(
                    x_ptr, documents_ptr, places, back, columns, inside, row, length, documented
                )
                out = taps_grad_ptr + (width - 1 - back) * channels + columns
                tl.store(out, tl.sum(grad * x, 0), mask=inside)
        elif documented:
            own = tl.load(documents_ptr + places, mask=there, other=-1)
            same = own == tl.load(documents_ptr + later, mask=there, other=-2)
            grad = tl.where(same[:, None], grad, 0.0)
        tap = tl.load(weight_ptr + columns * width + width - 1 - ahead, mask=inside, other=0.0)
        x_grad += tap.to(tl.float32)[None, :] * grad
    out = x_grad_ptr + (batch * length + places[:, None]) * channels + columns[None, :]
    mask = (places < length)[:, None] & inside[None, :]
    tl.store(out, x_grad.to(x_grad_ptr.dtype.element_ty), mask=mask)


def conv_forward(x: Tensor, weight: Tensor, bias: Tensor, documents: Tensor | None) -> Tensor:
    """silu(sum of weight_j x_{t - w + 1 + j} + bias) of each channel, in fp32; like x.

    x: (b, l, c). weight: (c, 1, w). bias: (c). documents: (b, l) ascending numbers; tokens of
    others count as 0."""
    x = x if x.stride(2) == 1 else x.contiguous()
    out = x.new_empty(x.shape)
    _forward[_grid(x)](
        *(x, weight.contiguous(), bias.contiguous(), _or_any(documents, x), out),
        *(x.shape[1], x.shape[2], x.stride(1), x.stride(0)),
        **_sizes(weight, documents),
    )
    return out


def conv_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor, documents: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, weight and bias. grad: like x. The rest as for `conv_forward`."""
    x = x if x.stride(2) == 1 else x.contiguous()
    grid, width = _grid(x), weight.shape[2]
    x_grad = x.new_empty(x.shape)
    taps = x.new_empty((x.shape[0], grid[0], width + 1, x.shape[2]), dtype=torch.float32)
    _backward[grid](
        *(grad.contiguous(), x, weight.contiguous(), bias.contiguous(), _or_any(documents, x)),
        *(x_grad, taps, x.shape[1], x.shape[2], x.stride(1), x.stride(0)),
        **_sizes(weight, documents),
    )
    summed = taps.sum((0, 1))
    of_weight = summed[:width].t().unsqueeze(1).to(weight.dtype).contiguous()
    return x_grad, of_weight, summed[width].to(bias.dtype)


def _grid(x: Tensor) -> tuple[int, int, int]:
    return triton.cdiv(x.shape[1], TOKENS), triton.cdiv(x.shape[2], CHANNELS), x.shape[0]


def _or_any(documents: Tensor | None, x: Tensor) -> Tensor:
    return x if documents is None else documents.contiguous()


def _sizes(weight: Tensor, documents: Tensor | None) -> dict[str, int | bool]:
    return {
        "width": weight.shape[2],
        "tokens": TOKENS,
        "block": CHANNELS,
        "documented": documents is not None,
        "num_warps": WARPS,
    }
