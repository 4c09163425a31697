"""A short causal convolution of each channel with SiLU behind it, and its backward pass: each reads
its inputs once, where torch's operators make a tensor for every tap."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

WIDTH = 4
TOKENS, CHANNELS, WARPS = 64, 128, 1
"""A program goes over this many tokens of this many channels, and keeps the last four in
registers."""


@triton.jit
def _row(ptr, place, row, columns, inside, length):
    """fp32 channels of a token, 0 outside of the sequence."""
    places = tl.zeros_like(columns) + place
    there = inside & (places >= 0) & (places < length)
    return tl.load(ptr + place * row + columns, mask=there, other=0.0).to(tl.float32)


@triton.jit
def _document(ptr, place, length, documented: tl.constexpr):
    """Number of a token's document; without documents all are of one."""
    number = place * 0
    if documented:
        number = tl.load(ptr + place, mask=(place >= 0) & (place < length), other=-1)
    return number


@triton.jit
def _forward(
    x_ptr, weight_ptr, bias_ptr, documents_ptr, out_ptr, length, channels, row, batch_stride,
    tokens: tl.constexpr, block: tl.constexpr, documented: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(2).to(tl.int64)
    start = tl.program_id(0).to(tl.int64) * tokens
    columns = tl.program_id(1) * block + tl.arange(0, block)
    inside = columns < channels
    x_ptr += batch * batch_stride
    out_ptr += batch * length * channels
    documents_ptr += batch * length
    w0, w1, w2, w3, bias = _parameters(weight_ptr, bias_ptr, columns, inside)
    x1 = _row(x_ptr, start - 1, row, columns, inside, length)
    x2 = _row(x_ptr, start - 2, row, columns, inside, length)
    x3 = _row(x_ptr, start - 3, row, columns, inside, length)
    d1 = _document(documents_ptr, start - 1, length, documented)
    d2 = _document(documents_ptr, start - 2, length, documented)
    d3 = _document(documents_ptr, start - 3, length, documented)
    following = _row(x_ptr, start, row, columns, inside, length)
    for index in range(tl.minimum(tokens, length - start)):
        place = start + index
        x0 = following
        following = _row(x_ptr, place + 1, row, columns, inside, length)
        d0 = _document(documents_ptr, place, length, documented)
        sums = bias + w3 * x0 + w2 * tl.where(d1 == d0, x1, 0.0)
        sums += w1 * tl.where(d2 == d0, x2, 0.0) + w0 * tl.where(d3 == d0, x3, 0.0)
        out = (sums * tl.sigmoid(sums)).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + place * channels + columns, out, mask=inside)
        x3, x2, x1 = x2, x1, x0
        d3, d2, d1 = d2, d1, d0


@triton.jit
def _backward(
    grad_ptr, x_ptr, weight_ptr, bias_ptr, documents_ptr, x_grad_ptr, taps_grad_ptr,
    length, channels, row, batch_stride, out_row, out_batch,
    tokens: tl.constexpr, block: tl.constexpr, documented: tl.constexpr,
):  # fmt: skip
    """taps_grad: (b, blocks of tokens, 5, channels) fp32, of the four taps and the bias."""
    batch = tl.program_id(2).to(tl.int64)
    start = tl.program_id(0).to(tl.int64) * tokens
    columns = tl.program_id(1) * block + tl.arange(0, block)
    inside = columns < channels
    x_ptr += batch * batch_stride
    grad_ptr += batch * length * channels
    x_grad_ptr += batch * out_batch
    documents_ptr += batch * length
    w0, w1, w2, w3, bias = _parameters(weight_ptr, bias_ptr, columns, inside)
    x1 = _row(x_ptr, start - 1, row, columns, inside, length)
    x2 = _row(x_ptr, start - 2, row, columns, inside, length)
    x3 = _row(x_ptr, start - 3, row, columns, inside, length)
    d1 = _document(documents_ptr, start - 1, length, documented)
    d2 = _document(documents_ptr, start - 2, length, documented)
    d3 = _document(documents_ptr, start - 3, length, documented)
    # Each by itself: the compiler takes variables that begin as one tensor for one variable.
    g1 = tl.zeros((block,), tl.float32)
    g2 = tl.zeros((block,), tl.float32)
    g3 = tl.zeros((block,), tl.float32)
    of_w0 = tl.zeros((block,), tl.float32)
    of_w1 = tl.zeros((block,), tl.float32)
    of_w2 = tl.zeros((block,), tl.float32)
    of_w3 = tl.zeros((block,), tl.float32)
    of_bias = tl.zeros((block,), tl.float32)
    following = _row(x_ptr, start, row, columns, inside, length)
    following_grad = _row(grad_ptr, start, channels, columns, inside, length)
    end = tl.minimum(start + tokens, length)
    # Three further tokens, whose gradients reach back into this block.
    for index in range(end - start + 3):
        place = start + index
        x0, grad = following, following_grad
        following = _row(x_ptr, place + 1, row, columns, inside, length)
        following_grad = _row(grad_ptr, place + 1, channels, columns, inside, length)
        d0 = _document(documents_ptr, place, length, documented)
        a1 = tl.where(d1 == d0, x1, 0.0)
        a2 = tl.where(d2 == d0, x2, 0.0)
        a3 = tl.where(d3 == d0, x3, 0.0)
        sums = bias + w3 * x0 + w2 * a1 + w1 * a2 + w0 * a3
        sigmoid = tl.sigmoid(sums)
        g0 = grad * sigmoid * (1 + sums * (1 - sigmoid))
        own = tl.where(place < end, g0, 0.0)
        of_w3 += own * x0
        of_w2 += own * a1
        of_w1 += own * a2
        of_w0 += own * a3
        of_bias += own
        x_grad = w3 * g3 + w2 * tl.where(d2 == d3, g2, 0.0)
        x_grad += w1 * tl.where(d1 == d3, g1, 0.0) + w0 * tl.where(d0 == d3, g0, 0.0)
        out = x_grad_ptr + (place - 3) * out_row + columns
        mask = inside & (tl.zeros_like(columns) + place >= start + 3)
        tl.store(out, x_grad.to(x_grad_ptr.dtype.element_ty), mask=mask)
        x3, x2, x1 = x2, x1, x0
        d3, d2, d1 = d2, d1, d0
        g3, g2, g1 = g2, g1, g0
    out = taps_grad_ptr + columns
    out += (batch * tl.num_programs(0) + tl.program_id(0)) * 5 * channels
    tl.store(out, of_w0, mask=inside)
    tl.store(out + channels, of_w1, mask=inside)
    tl.store(out + 2 * channels, of_w2, mask=inside)
    tl.store(out + 3 * channels, of_w3, mask=inside)
    tl.store(out + 4 * channels, of_bias, mask=inside)


@triton.jit
def _parameters(weight_ptr, bias_ptr, columns, inside):
    """The taps of three tokens before, two, one and none; the bias."""
    taps = weight_ptr + columns * 4
    w0 = tl.load(taps, mask=inside, other=0.0).to(tl.float32)
    w1 = tl.load(taps + 1, mask=inside, other=0.0).to(tl.float32)
    w2 = tl.load(taps + 2, mask=inside, other=0.0).to(tl.float32)
    w3 = tl.load(taps + 3, mask=inside, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    return w0, w1, w2, w3, bias


def conv_forward(x: Tensor, weight: Tensor, bias: Tensor, documents: Tensor | None) -> Tensor:
    """silu(sum of weight_j x_{t - 3 + j} + bias) of each channel, in fp32; like x.

    x: (b, l, c). weight: (c, 1, 4). bias: (c). documents: (b, l) ascending numbers; tokens of
    others count as 0."""
    x = x if x.stride(2) == 1 else x.contiguous()
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _forward[_grid(x)](
        *(x, weight.contiguous(), bias.contiguous(), _or_any(documents, x), out),
        *(x.shape[1], x.shape[2], x.stride(1), x.stride(0)),
        **_sizes(documents),
    )
    return out


def conv_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor, documents: Tensor | None, x_grad: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of weight and bias; that of x is written to x_grad. grad: like x. The rest as for
    `conv_forward`."""
    x = x if x.stride(2) == 1 else x.contiguous()
    grid = _grid(x)
    taps = x.new_empty((x.shape[0], grid[0], WIDTH + 1, x.shape[2]), dtype=torch.float32)
    _backward[grid](
        *(grad.contiguous(), x, weight.contiguous(), bias.contiguous(), _or_any(documents, x)),
        *(x_grad, taps, x.shape[1], x.shape[2], x.stride(1), x.stride(0)),
        *(x_grad.stride(1), x_grad.stride(0)),
        **_sizes(documents),
    )
    summed = taps.sum((0, 1))
    of_weight = summed[:WIDTH].t().unsqueeze(1).to(weight.dtype).contiguous()
    return of_weight, summed[WIDTH].to(bias.dtype)


def _grid(x: Tensor) -> tuple[int, int, int]:
    return triton.cdiv(x.shape[1], TOKENS), triton.cdiv(x.shape[2], CHANNELS), x.shape[0]


def _or_any(documents: Tensor | None, x: Tensor) -> Tensor:
    return x if documents is None else documents.contiguous()


def _sizes(documents: Tensor | None) -> dict[str, int | bool]:
    return {
        "tokens": TOKENS,
        "block": CHANNELS,
        "documented": documents is not None,
        "num_warps": WARPS,
    }
