"""The backward pass of `ssd`: one program for a chunk of a head, and one for what the heads of a
group share."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from trainyard.kernels.ssd import (
    Sequence,
    decay_between,
    decays_of_chunk,
    last_document,
    load_rows,
    seen_between,
)

PROGRAMS = 264
"""Two for each multiprocessor of an H100."""


@triton.jit
def _state_gradients(
    grad_ptr, dt_ptr, rate_ptr, c_ptr, documents_ptr, states_ptr, behind_ptr, total_ptr,
    length, heads, heads_of_group, chunks, c_row, c_batch,
    size: tl.constexpr, channels: tl.constexpr, block: tl.constexpr, numbers: tl.constexpr,
    documented: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    """behind: (b, k, heads, p, n), of the state behind each chunk. total: (blocks, b, k, heads), of
    the whole decay of each chunk, by what it does to the state before."""
    batch, head = tl.program_id(0).to(tl.int64) // heads, tl.program_id(0) % heads
    own = tl.program_id(1) * block + tl.arange(0, block)
    n = tl.arange(0, numbers)
    grad_ptr += batch * length * heads * channels + head * channels
    c_ptr += batch * c_batch + head // heads_of_group * numbers
    dt_ptr += batch * length * heads + head
    documents_ptr += batch * length
    rate = tl.load(rate_ptr + head)
    total_ptr += tl.program_id(1) * tl.num_programs(0) * chunks + batch * chunks * heads + head
    last_state = ((batch * chunks + chunks - 1) * heads + head) * channels * numbers
    states_ptr += last_state
    behind_ptr += last_state
    behind = tl.zeros((block, numbers), tl.float32)
    for back in range(chunks):
        chunk = chunks - 1 - back
        start = chunk * size
        tile = own[:, None] * numbers + n[None, :]
        tl.store(behind_ptr + tile, behind.to(behind_ptr.dtype.element_ty))
        places, dt, sums = decays_of_chunk(dt_ptr, rate, start, length, heads, size)
        kept, from_state = tl.exp(tl.sum(dt * rate, 0)), tl.exp(sums)
        if documented:
            before = last_document(documents_ptr, start - size, length, size)
            kept = tl.where(last_document(documents_ptr, start, length, size) == before, kept, 0.0)
            own_document = tl.load(documents_ptr + places, mask=places < length, other=-1)
            from_state = tl.where(own_document == before, from_state, 0.0)
        state = tl.load(states_ptr + tile).to(tl.float32)
        tl.store(total_ptr + chunk * heads, kept * tl.sum(behind * state))
        states_ptr -= heads * channels * numbers
        behind_ptr -= heads * channels * numbers
        grad = load_rows(grad_ptr, places, heads * channels, own, length)
        c = load_rows(c_ptr, places, c_row, n, length)
        weighted = (grad * from_state[:, None]).to(grad.dtype)
        behind = behind * kept + tl.dot(tl.trans(weighted), c, input_precision=precision)


@triton.jit
def _token_gradients(
    grad_ptr, x_ptr, dt_ptr, rate_ptr, b_ptr, c_ptr, documents_ptr, states_ptr, behind_ptr,
    total_ptr, x_grad_ptr, dt_grad_ptr, rate_grad_ptr,
    length, heads, heads_of_group, chunks, x_row, x_batch, b_row, b_batch, c_row, c_batch,
    size: tl.constexpr, channels: tl.constexpr, numbers: tl.constexpr,
    documented: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    """Of one chunk and head: x_grad (b, l, heads, p), dt_grad (b, l, heads), rate_grad (b, k,
    heads)."""
    batch, chunk = tl.program_id(0).to(tl.int64) // chunks, tl.program_id(0) % chunks
    head = tl.program_id(1)
    group = head // heads_of_group
    p, n = tl.arange(0, channels), tl.arange(0, numbers)
    start = chunk * size
    rate = tl.load(rate_ptr + head)
    dt_ptr += batch * length * heads + head
    places, dt, sums = decays_of_chunk(dt_ptr, rate, start, length, heads, size)
    inside = places < length
    seen, left, read = seen_between(
        documents_ptr + batch * length, places, start, length, sums, tl.sum(dt * rate, 0), size,
        documented,
    )  # fmt: skip
    b = load_rows(b_ptr + batch * b_batch + group * numbers, places, b_row, n, length)
    c = load_rows(c_ptr + batch * c_batch + group * numbers, places, c_row, n, length)
    x = load_rows(x_ptr + batch * x_batch + head * channels, places, x_row, p, length)
    row = (batch * length * heads + head) * channels
    grad = load_rows(grad_ptr + row, places, heads * channels, p, length)
    number = (batch * chunks + chunk) * heads + head
    tile = number * channels * numbers + p[:, None] * numbers + n[None, :]

    scored = tl.dot(c, tl.trans(b), input_precision=precision) * decay_between(sums, seen)
    x_grad = tl.dot(tl.trans((scored * dt[None, :]).to(x.dtype)), grad, input_precision=precision)
    scored *= tl.dot(grad, tl.trans(x), input_precision=precision)
    dt_grad = tl.sum(scored, 0)
    decay_grad = tl.sum(scored * dt[None, :], 1)
    behind = tl.load(behind_ptr + tile)
    written = tl.dot(b, tl.trans(behind), input_precision=precision) * left[:, None]
    x_grad += written * dt[:, None]
    of_state = tl.sum(written * x, 1)
    dt_grad += of_state
    state = tl.load(states_ptr + tile)
    answered = tl.dot(c, tl.trans(state), input_precision=precision) * read[:, None]
    decay_grad += tl.sum(answered * grad, 1) - dt * dt_grad
    of_total = tl.load(total_ptr + number) + tl.sum(of_state * dt, 0)
    # The running sum's gradient: each token's decay is in the sums of all from it on.
    decay_grad = tl.sum(decay_grad, 0) - tl.cumsum(decay_grad, 0) + decay_grad + of_total
    tl.store(rate_grad_ptr + number, tl.sum(decay_grad * dt, 0))
    at = (batch * length + places) * heads + head
    tl.store(dt_grad_ptr + at, dt_grad + decay_grad * rate, mask=inside)
    out = x_grad_ptr + at[:, None] * channels + p[None, :]
    tl.store(out, x_grad.to(x_grad_ptr.dtype.element_ty), mask=inside[:, None])


@triton.jit
def _group_gradients(
    grad_ptr, x_ptr, dt_ptr, rate_ptr, b_ptr, c_ptr, documents_ptr, states_ptr, behind_ptr,
    b_grad_ptr, c_grad_ptr,
    length, heads, heads_of_group, heads_here, chunks, parts,
    x_row, x_batch, b_row, b_batch, c_row, c_batch,
    size: tl.constexpr, channels: tl.constexpr, numbers: tl.constexpr, block: tl.constexpr,
    documented: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    """Of one chunk and some numbers of the state, summed over some heads of a group: b_grad and
    c_grad (b, l, parts, n)."""
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
    at = ((batch * length + places) * parts + part)[:, None] * numbers + own[None, :]
    tl.store(b_grad_ptr + at, b_grad, mask=(places < length)[:, None])
    tl.store(c_grad_ptr + at, c_grad, mask=(places < length)[:, None])


def ssd_backward(
    grad: Tensor,
    x: Tensor,
    dt: Tensor,
    rate: Tensor,
    b: Tensor,
    c: Tensor,
    documents: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, dt, rate, b and c. grad: like x. The rest as for `ssd_forward`."""
    of, grad = Sequence(x, dt, rate, b, c, documents), grad.contiguous()
    states, behind = of.states(), x.new_empty(of.state_shape())
    blocks = of.channels // of.block
    totals = dt.new_empty(blocks, of.batch, of.chunks, of.heads)
    _state_gradients[(of.batch * of.heads, blocks)](
        *(grad, of.dt, of.rate, of.c, of.documents, states, behind, totals),
        *(of.length, of.heads, of.of_group, of.chunks, of.c.stride(1), of.c.stride(0)),
        block=of.block,
        **of.sizes,
    )
    inputs = (grad, of.x, of.dt, of.rate, of.b, of.c, of.documents, states, behind)
    x_grad, dt_grad = x.new_empty(x.shape), dt.new_empty(dt.shape)
    rate_grad = dt.new_empty(of.batch, of.chunks, *rate.shape)
    _token_gradients[(of.batch * of.chunks, of.heads)](
        *(*inputs, totals.sum(0), x_grad, dt_grad, rate_grad),
        *(of.length, of.heads, of.of_group, of.chunks, *of.strides),
        **of.sizes,
    )
    heads_here = _heads_of_a_program(of)
    parts, numbers = of.heads // heads_here, min(64, of.numbers)
    b_grad, c_grad = (
        dt.new_empty(of.batch, of.length, of.groups, parts // of.groups, of.numbers)
        for _ in range(2)
    )
    _group_gradients[(of.batch * of.chunks, parts, of.numbers // numbers)](
        *(*inputs, b_grad, c_grad),
        *(of.length, of.heads, of.of_group, heads_here, of.chunks, parts, *of.strides),
        block=numbers,
        **of.sizes,
    )
    of_b, of_c = (found.sum(3).to(x.dtype) for found in (b_grad, c_grad))
    return x_grad, dt_grad, rate_grad.sum((0, 1)), of_b, of_c


def _heads_of_a_program(of: Sequence) -> int:
    """The most heads of a group, whose gradients of b and c it sums, that keep a GPU busy."""
    for heads in range(of.of_group, 1, -1):
        if of.of_group % heads == 0 and of.batch * of.chunks * of.heads // heads >= PROGRAMS:
            return heads
    return 1
