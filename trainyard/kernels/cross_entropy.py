"""Cross entropy of rows of logits and its gradient, each in one pass over the logits, in place of
torch's maximum, exponentials, sum and gather. A program has one row, or a part of it.

N rows, v logits of each, the first w <= v of which count. The label of a row is its place among
them, which may also be outside of them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

VECTOR = tl.constexpr(8)
"""Logits beside each other that one thread reads at once: 16 bytes of 16-bit numbers."""
BELOW_ALL = tl.constexpr(-3.0e38)
"""The maximum of nothing. Not -inf, whose difference to a logit of -inf is no number."""
FORWARD_BLOCK, FORWARD_WARPS, FORWARD_STAGES = 2048, 4, 1
BACKWARD_BLOCK, BACKWARD_WARPS, BACKWARD_ROUNDS = 2048, 4, 1
"""Logits at a time; warps of a program; blocks in flight, or blocks of a program."""


@triton.jit
def _with_block(x, highest, total):
    """Maxima and sums of exponentials of each vector's places, with one more block: each thread
    goes on alone, and one maximum for each vector costs an eighth more exponentials."""
    higher = tl.maximum(highest, tl.max(x, 1))
    exponentials = tl.sum(tl.exp(x - higher[:, None]), 1)
    return higher, total * tl.exp(highest - higher) + exponentials


@triton.jit
def _parts(
    logits_ptr,
    labels_ptr,
    out_ptr,
    num_rows,
    size,
    width,
    block: tl.constexpr,
    stages: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * size
    vectors: tl.constexpr = block // VECTOR
    places = tl.arange(0, vectors)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    highest = tl.full((vectors,), BELOW_ALL, tl.float32)
    total = tl.zeros((vectors,), tl.float32)
    # No mask on whole blocks: one that ends inside a vector would make narrow reads of all.
    whole = width // block * block
    for first in tl.range(0, whole, block, num_stages=stages):
        x = tl.load(logits_ptr + first + places).to(tl.float32)
        highest, total = _with_block(x, highest, total)
    last = whole + places
    x = tl.load(logits_ptr + last, mask=last < size, other=float("-inf")).to(tl.float32)
    x = tl.where(last < width, x, float("-inf"))
    highest, total = _with_block(x, highest, total)
    of_row = tl.max(highest, 0)
    total = tl.sum(total * tl.exp(highest - of_row), 0)
    label = tl.load(labels_ptr + row)
    of_label = tl.load(logits_ptr + label, mask=(label >= 0) & (label < width), other=0.0)
    tl.store(out_ptr + row, of_row)
    tl.store(out_ptr + num_rows + row, total)
    tl.store(out_ptr + 2 * num_rows + row, of_label.to(tl.float32))


@triton.jit
def _backward(
    logits_ptr,
    labels_ptr,
    log_norm_ptr,
    grad_ptr,
    size,
    width,
    block: tl.constexpr,
    rounds: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * size
    label = tl.load(labels_ptr + row).to(tl.int32)
    log_norm, grad = tl.load(log_norm_ptr + row), tl.load(grad_ptr + row)
    for number in range(rounds):
        place = (tl.program_id(1) * rounds + number) * block + tl.arange(0, block)
        inside = place < size
        softmax = tl.exp(tl.load(logits_ptr + place, mask=inside).to(tl.float32) - log_norm)
        gradient = tl.where(place == label, softmax - 1.0, softmax) * grad
        gradient = tl.where(place < width, gradient, 0.0)
        tl.store(logits_ptr + place, gradient.to(logits_ptr.dtype.element_ty), mask=inside)


def cross_entropy_parts(logits: Tensor, labels: Tensor, width: int) -> Tensor:
    """(3, N) fp32 of each row: its maximum, the sum of exp(logit - maximum), and the label's logit,
    0 if there is none. logits: (N, v), contiguous; labels: (N) int64. Of no logits (w = 0) the
    maximum is lower than any, the sum 0."""
    rows, size = logits.shape
    out = torch.empty(3, rows, dtype=torch.float32, device=logits.device)
    if rows:
        _parts[(rows,)](
            *(logits, labels, out, rows, size, width),
            block=FORWARD_BLOCK,
            stages=FORWARD_STAGES,
            num_warps=FORWARD_WARPS,
        )
    return out


def cross_entropy_backward(
    logits: Tensor, labels: Tensor, log_norm: Tensor, grad: Tensor, width: int
) -> None:
    """Overwrites logits (N, v), contiguous, with (exp(logit - log_norm) - one at the label) x grad,
    zero behind the first `width`. labels, log_norm, grad: (N)."""
    rows, size = logits.shape
    if rows:
        _backward[(rows, triton.cdiv(size, BACKWARD_BLOCK * BACKWARD_ROUNDS))](
            *(logits, labels, log_norm, grad.contiguous(), size, width),
            block=BACKWARD_BLOCK,
            rounds=BACKWARD_ROUNDS,
            num_warps=BACKWARD_WARPS,
        )
