"""The backward pass of `ssd`: one program for a chunk of a head, and one for what the heads of a
group share."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from trainyard.kernels.ssd import (
    STATE_LOOP,
    Sequence,
    decay_between,
    decays_of_chunk,
    last_document,
    load_rows,
    seen_between,
    state_kept,
)

PROGRAMS = 264
"""Two for each multiprocessor of an H100."""


@triton.jit
def _state_gradients(
    grad_ptr, dt_ptr, rate_ptr, c_ptr, documents_ptr, behind_ptr,
    length, heads, heads_of_group, chunks, c_row, c_batch,
    size: tl.constexpr, channels: tl.constexpr, block: tl.constexpr, numbers: tl.constexpr,
    documented: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    """behind: (b, k, heads, p, n), of the state behind each chunk."""
    batch, head = tl.program_id(0).to(tl.int64) // heads, tl.program_id(0) % heads
    own = tl.program_id(1) * block + tl.arange(0, block)
    n = tl.arange(0, numbers)
    grad_ptr += batch * length * heads * channels + head * channels
    c_ptr += batch * c_batch + head // heads_of_group * numbers
    dt_ptr += batch * length * heads + head
    documents_ptr += batch * length
    rate = tl.load(rate_ptr + head)
    behind_ptr += ((batch * chunks + chunks - 1) * heads + head) * channels * numbers
    behind = tl.zeros((block, numbers), tl.float32)
    for back in range(chunks):
        chunk = chunks - 1 - back
        start = chunk * size
        tile = own[:, None] * numbers + n[None, :]
        tl.store(behind_ptr + tile, behind.to(behind_ptr.dtype.element_ty))
        places, dt, sums = decays_of_chunk(dt_ptr, rate, start, length, heads, size)
        total, from_state = tl.sum(dt * rate, 0), tl.exp(sums)
        kept = state_kept(documents_ptr, start, length, total, size, documented)
        if documented:
            before = last_document(documents_ptr, start - size, length, size)
            own_document = tl.load(documents_ptr + places, mask=places < length, other=-1)
            from_state = tl.where(own_document == before, from_state, 0.0)
        behind_ptr -= heads * channels * numbers
        grad = load_rows(grad_ptr, places, heads * channels, own, length)
        c = load_rows(c_ptr, places, c_row, n, length)
        weighted = (grad * from_state[:, None]).to(grad.dtype)
        behind = behind * kept + tl.dot(tl.trans(weighted), c, input_precision=precision)


@triton.jit
def _token_gradients(
    grad_ptr, x_ptr, dt_ptr, rate_ptr, b_ptr, c_ptr, documents_ptr, states_ptr, behind_ptr,
    skip_ptr, x_grad_ptr, dt_grad_ptr, rate_grad_ptr, skip_grad_ptr,
    length, heads, heads_of_group, chunks, x_row, x_batch, b_row, b_batch, c_row, c_batch,
    out_row, out_batch,
    size: tl.constexpr, channels: tl.constexpr, numbers: tl.constexpr,
    documented: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    """Of one chunk and head: x_grad (b, l, heads, p), dt_grad (b, l, heads), rate_grad and
    skip_grad (b, k, heads)."""
    batch, chunk = tl.program_id(0).to(tl.int64) // chunks, tl.program_id(0) % chunks
    head = tl.program_id(1)
    group = head // heads_of_group
    p, n = tl.arange(0, channels), tl.arange(0, numbers)
    start = chunk * size
    rate = tl.load(rate_ptr + head)
    dt_ptr += batch * length * heads + head
    places, dt, sums = decays_of_chunk(dt_ptr, rate, start, length, heads, size)
    total = tl.sum(dt * rate, 0)
    inside = places < length
    documents_ptr += batch * length
    seen, left, read = seen_between(
        documents_ptr, places, start, length, sums, total, size, documented
    )
    kept = state_kept(documents_ptr, start, length, total, size, documented)
    b = load_rows(b_ptr + batch * b_batch + group * numbers, places, b_row, n, length)
    c = load_rows(c_ptr + batch * c_batch + group * numbers, places, c_row, n, length)
    x = load_rows(x_ptr + batch * x_batch + head * channels, places, x_row, p, length)
    row = (batch * length * heads + head) * channels
    grad = load_rows(grad_ptr + row, places, heads * channels, p, length)
    number = (batch * chunks + chunk) * heads + head
    tile = number * channels * numbers + p[:, None] * numbers + n[None, :]
    behind = tl.load(behind_ptr + tile)
    state = tl.load(states_ptr + tile)

    scored = tl.dot(c, tl.trans(b), input_precision=precision) * decay_between(sums, seen)
    x_grad = tl.dot(tl.trans((scored * dt[None, :]).to(x.dtype)), grad, input_precision=precision)
    scored *= tl.dot(grad, tl.trans(x), input_precision=precision)
    dt_grad = tl.sum(scored, 0)
    decay_grad = tl.sum(scored * dt[None, :], 1)
    written = tl.dot(b, tl.trans(behind), input_precision=precision) * left[:, None]
    x_grad += written * dt[:, None]
    of_state = tl.sum(written * x, 1)
    dt_grad += of_state
    answered = tl.dot(c, tl.trans(state), input_precision=precision) * read[:, None]
    decay_grad += tl.sum(answered * grad, 1) - dt * dt_grad
    of_total = kept * tl.sum(behind.to(tl.float32) * state.to(tl.float32))
    of_total += tl.sum(of_state * dt, 0)
    # The running sum's gradient: each token's decay is in the sums of all from it on.
    decay_grad = tl.sum(decay_grad, 0) - tl.cumsum(decay_grad, 0) + decay_grad + of_total
    tl.store(rate_grad_ptr + number, tl.sum(decay_grad * dt, 0))
    at = (batch * length + places) * heads + head
    tl.store(dt_grad_ptr + at, dt_grad + decay_grad * rate, mask=inside)
    x_grad += tl.load(skip_ptr + head) * grad.to(tl.float32)
    tl.store(skip_grad_ptr + number, tl.sum(grad.to(tl.float32) * x.to(tl.float32)))
    out = x_grad_ptr + batch * out_batch + head * channels
    out += places.to(tl.int64)[:, None] * out_row + p[None, :]
    tl.store(out, x_grad.to(x_grad_ptr.dtype.element_ty), mask=inside[:, None])


@triton.jit
def _group_gradients(
    grad_ptr, x_ptr, dt_ptr, rate_ptr, b_ptr, c_ptr, documents_ptr, states_ptr, behind_ptr,
    b_grad_ptr, c_grad_ptr,
    length, heads, heads_of_group, heads_here, chunks,
    x_row, x_batch, b_row, b_batch, c_row, c_batch, out_row, out_batch,
    size: tl.constexpr, channels: tl.constexpr, numbers: tl.constexpr, block: tl.constexpr,
    documented: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    """Of one chunk and some numbers of the state, summed over some heads of a group: b_grad and
    c_grad (b, l, parts, n), the last two beside each other."""
    batch, chunk = tl.program_id(0).to(tl.int64) // chunks, tl.program_id(0) % chunks
    part = tl.program_id(1)
    first_head = part * heads_here
    group = first_head // heads_of_group
    own = tl.program_id(2) * block + tl.arange(0, block)
    p = tl.arange(0, channels)
    start = chunk * size
    b = load_rows(
        b_ptr + batch * b_batch + group * numbers, start + tl.arange(0, size), b_row, own, length
    )
    c = load_rows(
        c_ptr + batch * c_batch + group * numbers, start + tl.arange(0, size), c_row, own, length
    )
    b_grad = tl.zeros((size, block), tl.float32)
    c_grad = tl.zeros((size, block), tl.float32)
    for index in range(heads_here):
        head = first_head + index
        rate = tl.load(rate_ptr + head)
        of_head = dt_ptr + batch * length * heads + head
        places, dt, sums = decays_of_chunk(of_head, rate, start, length, heads, size)
        seen, left, read = seen_between(
            documents_ptr + batch * length, places, start, length, sums, tl.sum(dt * rate, 0),
            size, documented,
        )  # fmt: skip
        x = load_rows(x_ptr + batch * x_batch + head * channels, places, x_row, p, length)
        row = (batch * length * heads + head) * channels
        grad = load_rows(grad_ptr + row, places, heads * channels, p, length)
        of_scores = tl.dot(grad, tl.trans(x), input_precision=precision) * decay_between(sums, seen)
        of_scores = (of_scores * dt[None, :]).to(x.dtype)
        c_grad += tl.dot(of_scores, b, input_precision=precision)
        b_grad += tl.dot(tl.trans(of_scores), c, input_precision=precision)
        tile = ((batch * chunks + chunk) * heads + head) * channels * numbers
        tile += p[:, None] * numbers + own[None, :]
        weighted = (x * (left * dt)[:, None]).to(x.dtype)
        b_grad += tl.dot(weighted, tl.load(behind_ptr + tile), input_precision=precision)
        seen_state = (grad * read[:, None]).to(x.dtype)
        c_grad += tl.dot(seen_state, tl.load(states_ptr + tile), input_precision=precision)
    places = start + tl.arange(0, size)
    at = batch * out_batch + part * numbers
    at += places.to(tl.int64)[:, None] * out_row + own[None, :]
    inside = (places < length)[:, None]
    tl.store(b_grad_ptr + at, b_grad.to(b_grad_ptr.dtype.element_ty), mask=inside)
    tl.store(c_grad_ptr + at, c_grad.to(c_grad_ptr.dtype.element_ty), mask=inside)


def ssd_backward(
    grad: Tensor, of: Sequence, x_grad: Tensor, b_grad: Tensor, c_grad: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of dt, rate and skip; those of x, b and c are written to the tensors given.

    grad: like x, contiguous."""
    states, behind = of.states(), grad.new_empty(of.state_shape())
    _state_gradients[(of.batch * of.heads, of.channels // of.block)](
        *(grad, of.dt, of.rate, of.c, of.documents, behind),
        *(of.length, of.heads, of.of_group, of.chunks, of.c.stride(1), of.c.stride(0)),
        block=of.block,
        **of.sizes,
        **STATE_LOOP,
    )
    inputs = (grad, of.x, of.dt, of.rate, of.b, of.c, of.documents, states, behind)
    dt_grad = torch.empty_like(of.dt)
    rate_grad, skip_grad = (of.dt.new_empty(of.batch, of.chunks, *of.rate.shape) for _ in range(2))
    _token_gradients[(of.batch * of.chunks, of.heads)](
        *(*inputs, of.skip, x_grad, dt_grad, rate_grad, skip_grad),
        *(of.length, of.heads, of.of_group, of.chunks, *of.strides),
        *(x_grad.stride(1), x_grad.stride(0)),
        **of.sizes,
    )
    _shared_gradients(inputs, of, b_grad, c_grad)
    return dt_grad, rate_grad.sum((0, 1)), skip_grad.sum((0, 1))


def _shared_gradients(
    inputs: tuple[Tensor, ...], of: Sequence, b_grad: Tensor, c_grad: Tensor
) -> None:
    """Of what the heads of a group share, summed by as many programs as keep a GPU busy."""
    heads_here = _heads_of_a_program(of)
    parts, numbers = of.heads // heads_here, min(64, of.numbers)
    found = b_grad, c_grad
    if parts > of.groups:
        shape = (of.batch, of.length, of.groups, parts // of.groups, of.numbers)
        found = of.dt.new_empty(shape), of.dt.new_empty(shape)
    _group_gradients[(of.batch * of.chunks, parts, of.numbers // numbers)](
        *(*inputs, *found),
        *(of.length, of.heads, of.of_group, heads_here, of.chunks, *of.strides),
        *(found[0].stride(1), found[0].stride(0)),
        block=numbers,
        **of.sizes,
    )
    if parts > of.groups:
        b_grad.copy_(found[0].sum(3))
        c_grad.copy_(found[1].sum(3))


def _heads_of_a_program(of: Sequence) -> int:
    """The most heads of a group, whose gradients of b and c it sums, that keep a GPU busy."""
    for heads in range(of.of_group, 1, -1):
        if of.of_group % heads == 0 and of.batch * of.chunks * of.heads // heads >= PROGRAMS:
            return heads
    return 1
