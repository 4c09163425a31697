"""The state space of Mamba-2 over whole sequences, and its backward pass (SSD, arXiv:2405.21060,
sections 6 and 7), in place of the tensors between all tokens of a chunk that torch would write.

Per head, with a = dt rate, A its running sum within a chunk, S the state before the chunk:

    y_i = sum over j <= i of (c_i . b_j) exp(A_i - A_j) dt_j x_j + exp(A_i) S c_i

A pass over the chunks carries the state in registers, forwards for S and backwards for the gradient
of the state behind each chunk; all else of a chunk is one program. Products have the type of x and
fp32 sums. l tokens, p channels of a head, n numbers of the state of a channel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 64
"""Tokens: tiles of 64 by 64 fit the registers of a block, and states are few enough."""
PROGRAMS = 264
"""Two for each multiprocessor of an H100."""


@triton.jit
def _chunk(dt_ptr, rate, start, length, heads, size: tl.constexpr):
    """Time steps of a chunk, 0 behind the end, and the running sum of their decays."""
    places = start + tl.arange(0, size)
    dt = tl.load(dt_ptr + places * heads, mask=places < length, other=0.0)
    return places, dt, tl.cumsum(dt * rate, 0)


@triton.jit
def _tile(ptr, places, stride, columns, length):
    """Rows of tokens, 0 behind the end."""
    inside = (places < length)[:, None]
    at = places.to(tl.int64)[:, None] * stride + columns[None, :]
    return tl.load(ptr + at, mask=inside, other=0.0)


@triton.jit
def _last_document(documents_ptr, start, length, size: tl.constexpr):
    """Of the last token of the chunk at start; -1 before the first."""
    last = tl.minimum(start + size, length) - 1
    return tl.load(documents_ptr + last, mask=last >= 0, other=-1)


@triton.jit
def _states(
    x_ptr, dt_ptr, rate_ptr, b_ptr, documents_ptr, states_ptr,
    length, heads, heads_of_group, chunks, x_row, x_batch, b_row, b_batch,
    size: tl.constexpr, channels: tl.constexpr, block: tl.constexpr, numbers: tl.constexpr,
    documented: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    """states: (b, k, heads, p, n), before each chunk, as wide as x."""
    batch, head = tl.program_id(0).to(tl.int64) // heads, tl.program_id(0) % heads
    own = tl.program_id(1) * block + tl.arange(0, block)
    n = tl.arange(0, numbers)
    x_ptr += batch * x_batch + head * channels
    b_ptr += batch * b_batch + head // heads_of_group * numbers
    dt_ptr += batch * length * heads + head
    documents_ptr += batch * length
    rate = tl.load(rate_ptr + head)
    states_ptr += (batch * chunks * heads + head) * channels * numbers
    state = tl.zeros((block, numbers), tl.float32)
    for chunk in range(chunks):
        tile = own[:, None] * numbers + n[None, :]
        tl.store(states_ptr + tile, state.to(states_ptr.dtype.element_ty))
        states_ptr += heads * channels * numbers
        start = chunk * size
        places, dt, sums = _chunk(dt_ptr, rate, start, length, heads, size)
        total = tl.sum(dt * rate, 0)
        left = tl.exp(total - sums) * dt
        kept = tl.exp(total)
        if documented:
            last = _last_document(documents_ptr, start, length, size)
            own_document = tl.load(documents_ptr + places, mask=places < length, other=-1)
            left = tl.where(own_document == last, left, 0.0)
            same = last == _last_document(documents_ptr, start - size, length, size)
            kept = tl.where(same, kept, 0.0)
        x = _tile(x_ptr, places, x_row, own, length)
        b = _tile(b_ptr, places, b_row, n, length)
        weighted = (x * left[:, None]).to(x.dtype)
        state = state * kept + tl.dot(tl.trans(weighted), b, input_precision=precision)


@triton.jit
def _outputs(
    x_ptr, dt_ptr, rate_ptr, b_ptr, c_ptr, documents_ptr, states_ptr, y_ptr,
    length, heads, heads_of_group, chunks, x_row, x_batch, b_row, b_batch, c_row, c_batch,
    size: tl.constexpr, channels: tl.constexpr, numbers: tl.constexpr,
    documented: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    """y: (b, l, heads, p)."""
    batch, chunk = tl.program_id(0).to(tl.int64) // chunks, tl.program_id(0) % chunks
    head = tl.program_id(1)
    p, n, q = tl.arange(0, channels), tl.arange(0, numbers), tl.arange(0, size)
    start = chunk * size
    dt_ptr += batch * length * heads + head
    group = head // heads_of_group
    places, dt, sums = _chunk(dt_ptr, tl.load(rate_ptr + head), start, length, heads, size)
    x = _tile(x_ptr + batch * x_batch + head * channels, places, x_row, p, length)
    b = _tile(b_ptr + batch * b_batch + group * numbers, places, b_row, n, length)
    c = _tile(c_ptr + batch * c_batch + group * numbers, places, c_row, n, length)
    seen = q[:, None] >= q[None, :]
    from_state = tl.exp(sums)
    if documented:
        documents_ptr += batch * length
        own = tl.load(documents_ptr + places, mask=places < length, other=-1)
        seen = seen & (own[:, None] == own[None, :])
        before = _last_document(documents_ptr, start - size, length, size)
        from_state = tl.where(own == before, from_state, 0.0)
    between = tl.exp(tl.where(seen, sums[:, None] - sums[None, :], float("-inf")))
    scores = tl.dot(c, tl.trans(b), input_precision=precision)
    weights = (scores * between * dt[None, :]).to(x.dtype)
    y = tl.dot(weights, x, input_precision=precision)
    number = (batch * chunks + chunk) * heads + head
    state = tl.load(states_ptr + number * channels * numbers + p[:, None] * numbers + n[None, :])
    y += tl.dot(c, tl.trans(state), input_precision=precision) * from_state[:, None]
    out = y_ptr + ((batch * length + places[:, None]) * heads + head) * channels + p[None, :]
    tl.store(out, y.to(y_ptr.dtype.element_ty), mask=(places < length)[:, None])


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
        places, dt, sums = _chunk(dt_ptr, rate, start, length, heads, size)
        kept, from_state = tl.exp(tl.sum(dt * rate, 0)), tl.exp(sums)
        if documented:
            before = _last_document(documents_ptr, start - size, length, size)
            kept = tl.where(_last_document(documents_ptr, start, length, size) == before, kept, 0.0)
            own_document = tl.load(documents_ptr + places, mask=places < length, other=-1)
            from_state = tl.where(own_document == before, from_state, 0.0)
        state = tl.load(states_ptr + tile).to(tl.float32)
        tl.store(total_ptr + chunk * heads, kept * tl.sum(behind * state))
        states_ptr -= heads * channels * numbers
        behind_ptr -= heads * channels * numbers
        grad = _tile(grad_ptr, places, heads * channels, own, length)
        c = _tile(c_ptr, places, c_row, n, length)
        weighted = (grad * from_state[:, None]).to(grad.dtype)
        behind = behind * kept + tl.dot(tl.trans(weighted), c, input_precision=precision)


@triton.jit
def _gradients(
    grad_ptr, x_ptr, dt_ptr, rate_ptr, b_ptr, c_ptr, documents_ptr, states_ptr, behind_ptr,
    total_ptr, x_grad_ptr, dt_grad_ptr, rate_grad_ptr, b_grad_ptr, c_grad_ptr,
    length, heads, heads_of_group, heads_here, chunks, parts,
    x_row, x_batch, b_row, b_batch, c_row, c_batch,
    size: tl.constexpr, channels: tl.constexpr, numbers: tl.constexpr,
    documented: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    """One chunk, and some heads of a group: x_grad (b, l, heads, p), dt_grad (b, l, heads),
    rate_grad (b, k, heads), and b_grad and c_grad (parts, b, l, n) of these heads."""
    batch, chunk = tl.program_id(0).to(tl.int64) // chunks, tl.program_id(0) % chunks
    part = tl.program_id(1)
    first_head = part * heads_here
    group = first_head // heads_of_group
    p, n, q = tl.arange(0, channels), tl.arange(0, numbers), tl.arange(0, size)
    start = chunk * size
    places = start + q
    inside = places < length
    b = _tile(b_ptr + batch * b_batch + group * numbers, places, b_row, n, length)
    c = _tile(c_ptr + batch * c_batch + group * numbers, places, c_row, n, length)
    scores = tl.dot(c, tl.trans(b), input_precision=precision)
    seen = q[:, None] >= q[None, :]
    to_state, from_before = inside, inside
    if documented:
        documents_ptr += batch * length
        own = tl.load(documents_ptr + places, mask=inside, other=-1)
        seen = seen & (own[:, None] == own[None, :])
        to_state = own == _last_document(documents_ptr, start, length, size)
        from_before = own == _last_document(documents_ptr, start - size, length, size)
    b_grad = tl.zeros((size, numbers), tl.float32)
    c_grad = tl.zeros((size, numbers), tl.float32)
    for index in range(heads_here):
        head = first_head + index
        rate = tl.load(rate_ptr + head)
        _, dt, sums = _chunk(
            dt_ptr + batch * length * heads + head, rate, start, length, heads, size
        )
        left = tl.where(to_state, tl.exp(tl.sum(dt * rate, 0) - sums), 0.0)
        read = tl.where(from_before, tl.exp(sums), 0.0)
        x = _tile(x_ptr + batch * x_batch + head * channels, places, x_row, p, length)
        row = (batch * length * heads + head) * channels
        grad = _tile(grad_ptr + row, places, heads * channels, p, length)
        between = tl.exp(tl.where(seen, sums[:, None] - sums[None, :], float("-inf")))
        products = tl.dot(grad, tl.trans(x), input_precision=precision) * between
        weights = (scores * between * dt[None, :]).to(x.dtype)
        x_grad = tl.dot(tl.trans(weights), grad, input_precision=precision)
        scored = products * scores
        dt_grad = tl.sum(scored, 0)
        decay_grad = tl.sum(scored * dt[None, :], 1)
        of_scores = (products * dt[None, :]).to(x.dtype)
        c_grad += tl.dot(of_scores, b, input_precision=precision)
        b_grad += tl.dot(tl.trans(of_scores), c, input_precision=precision)

        number = (batch * chunks + chunk) * heads + head
        tile = number * channels * numbers + p[:, None] * numbers + n[None, :]
        behind = tl.load(behind_ptr + tile)
        written = tl.dot(b, tl.trans(behind), input_precision=precision) * left[:, None]
        x_grad += written * dt[:, None]
        of_state = tl.sum(written * x, 1)
        dt_grad += of_state
        weighted = (x * (left * dt)[:, None]).to(x.dtype)
        b_grad += tl.dot(weighted, behind, input_precision=precision)
        state = tl.load(states_ptr + tile)
        seen_state = (grad * read[:, None]).to(x.dtype)
        c_grad += tl.dot(seen_state, state, input_precision=precision)
        answered = tl.dot(c, tl.trans(state), input_precision=precision) * read[:, None]
        decay_grad += tl.sum(answered * grad, 1)

        decay_grad -= dt * dt_grad
        of_total = tl.load(total_ptr + number) + tl.sum(of_state * dt, 0)
        # The running sum's gradient: each token's decay is in the sums of all from it on.
        decay_grad = tl.sum(decay_grad, 0) - tl.cumsum(decay_grad, 0) + decay_grad + of_total
        dt_grad += decay_grad * rate
        tl.store(rate_grad_ptr + number, tl.sum(decay_grad * dt, 0))
        at = (batch * length + places) * heads + head
        tl.store(dt_grad_ptr + at, dt_grad, mask=inside)
        out = x_grad_ptr + at[:, None] * channels + p[None, :]
        tl.store(out, x_grad.to(x_grad_ptr.dtype.element_ty), mask=inside[:, None])
    at = ((batch * length + places) * parts + part)[:, None] * numbers + n[None, :]
    tl.store(b_grad_ptr + at, b_grad, mask=inside[:, None])
    tl.store(c_grad_ptr + at, c_grad, mask=inside[:, None])


class _Sequence:
    """The arguments that all kernels share."""

    def __init__(
        self, x: Tensor, dt: Tensor, rate: Tensor, b: Tensor, c: Tensor, documents: Tensor | None
    ) -> None:
        self.x, self.b, self.c = (_rows(tensor) for tensor in (x, b, c))
        self.dt, self.rate = dt.contiguous(), rate.contiguous()
        self.batch, self.length, self.groups, of_group, self.channels = x.shape
        self.heads, self.of_group = self.groups * of_group, of_group
        self.numbers, self.chunks = b.shape[-1], triton.cdiv(self.length, CHUNK)
        self.is_documented = documents is not None
        # Never read if there are none.
        self.documents = self.dt if documents is None else documents.contiguous()
        self.block = min(32, self.channels)
        self.sizes = {
            "size": CHUNK,
            "channels": self.channels,
            "numbers": self.numbers,
            "documented": self.is_documented,
            "precision": "ieee" if x.dtype == torch.float32 else "tf32",
        }

    def state_shape(self) -> tuple[int, ...]:
        """Of a state for each chunk and head."""
        return (self.batch, self.chunks, self.heads, self.channels, self.numbers)

    def states(self) -> Tensor:
        """The states before the chunks."""
        states = self.x.new_empty(self.state_shape())
        _states[(self.batch * self.heads, self.channels // self.block)](
            *(self.x, self.dt, self.rate, self.b, self.documents, states),
            *(self.length, self.heads, self.of_group, self.chunks),
            *(self.x.stride(1), self.x.stride(0), self.b.stride(1), self.b.stride(0)),
            block=self.block,
            **self.sizes,
        )
        return states


def ssd_forward(
    x: Tensor, dt: Tensor, rate: Tensor, b: Tensor, c: Tensor, documents: Tensor | None
) -> Tensor:
    """y like x, from a state of 0.

    x: (b, l, g, r, p). dt: (b, l, g, r) fp32. rate: (g, r) fp32, below 0. b, c: (b, l, g, n).
    documents: (b, l) ascending numbers."""
    of = _Sequence(x, dt, rate, b, c, documents)
    y = x.new_empty(x.shape)
    _outputs[(of.batch * of.chunks, of.heads)](
        *(of.x, of.dt, of.rate, of.b, of.c, of.documents, of.states(), y),
        *(of.length, of.heads, of.of_group, of.chunks),
        *(of.x.stride(1), of.x.stride(0), of.b.stride(1), of.b.stride(0)),
        *(of.c.stride(1), of.c.stride(0)),
        **of.sizes,
    )
    return y


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
    of, grad = _Sequence(x, dt, rate, b, c, documents), grad.contiguous()
    states, behind = of.states(), x.new_empty(of.state_shape())
    blocks = of.channels // of.block
    totals = dt.new_empty(blocks, of.batch, of.chunks, of.heads)
    _state_gradients[(of.batch * of.heads, blocks)](
        *(grad, of.dt, of.rate, of.c, of.documents, states, behind, totals),
        *(of.length, of.heads, of.of_group, of.chunks, of.c.stride(1), of.c.stride(0)),
        block=of.block,
        **of.sizes,
    )
    heads_here = _heads_of_a_program(of)
    parts = of.heads // heads_here
    x_grad, dt_grad = x.new_empty(x.shape), dt.new_empty(dt.shape)
    rate_grad = dt.new_empty(of.batch, of.chunks, *rate.shape)
    b_grad, c_grad = (
        dt.new_empty(of.batch, of.length, of.groups, parts // of.groups, of.numbers)
        for _ in range(2)
    )
    _gradients[(of.batch * of.chunks, parts)](
        *(grad, of.x, of.dt, of.rate, of.b, of.c, of.documents, states, behind, totals.sum(0)),
        *(x_grad, dt_grad, rate_grad, b_grad, c_grad),
        *(of.length, of.heads, of.of_group, heads_here, of.chunks, parts),
        *(of.x.stride(1), of.x.stride(0), of.b.stride(1), of.b.stride(0)),
        *(of.c.stride(1), of.c.stride(0)),
        **of.sizes,
    )
    of_b, of_c = (found.sum(3).to(x.dtype) for found in (b_grad, c_grad))
    return x_grad, dt_grad, rate_grad.sum((0, 1)), of_b, of_c


def _heads_of_a_program(of: _Sequence) -> int:
    """The most heads of a group, whose gradients of b and c it sums, that keep a GPU busy."""
    for heads in range(of.of_group, 1, -1):
        if of.of_group % heads == 0 and of.batch * of.chunks * of.heads // heads >= PROGRAMS:
            return heads
    return 1


def _rows(x: Tensor) -> Tensor:
    """With all that belongs to a token beside each other."""
    return x if x[0, 0].is_contiguous() else x.contiguous()
