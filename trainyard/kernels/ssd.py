"""The state space of Mamba-2 over whole sequences (SSD, arXiv:2405.21060, sections 6 and 7), in
place of the tensors between all tokens of a chunk that torch would write.

Per head, with a = dt rate, A its running sum within a chunk, S the state before the chunk:

    y_i = sum over j <= i of (c_i . b_j) exp(A_i - A_j) dt_j x_j + exp(A_i) S c_i + skip x_i

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
STATE_LOOP = {"num_warps": 2, "num_stages": 2}
"""The fastest on an H200 for the passes over the chunks."""


@triton.jit
def decays_of_chunk(dt_ptr, rate, start, length, heads, size: tl.constexpr):
    """Time steps of a chunk, 0 behind the end, and the running sum of their decays."""
    places = start + tl.arange(0, size)
    dt = tl.load(dt_ptr + places * heads, mask=places < length, other=0.0)
    return places, dt, tl.cumsum(dt * rate, 0)


@triton.jit
def load_rows(ptr, places, stride, columns, length):
    """Rows of tokens, 0 behind the end."""
    inside = (places < length)[:, None]
    at = places.to(tl.int64)[:, None] * stride + columns[None, :]
    return tl.load(ptr + at, mask=inside, other=0.0)


@triton.jit
def last_document(documents_ptr, start, length, size: tl.constexpr):
    """Of the last token of the chunk at start; -1 before the first."""
    last = tl.minimum(start + size, length) - 1
    return tl.load(documents_ptr + last, mask=last >= 0, other=-1)


@triton.jit
def state_kept(documents_ptr, start, length, total, size: tl.constexpr, documented: tl.constexpr):
    """What the chunk at start leaves of the state before it. total: the sum of its decays."""
    kept = tl.exp(total)
    if documented:
        before = last_document(documents_ptr, start - size, length, size)
        kept = tl.where(last_document(documents_ptr, start, length, size) == before, kept, 0.0)
    return kept


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
        places, dt, sums = decays_of_chunk(dt_ptr, rate, start, length, heads, size)
        total = tl.sum(dt * rate, 0)
        left = tl.exp(total - sums) * dt
        kept = state_kept(documents_ptr, start, length, total, size, documented)
        if documented:
            last = last_document(documents_ptr, start, length, size)
            own_document = tl.load(documents_ptr + places, mask=places < length, other=-1)
            left = tl.where(own_document == last, left, 0.0)
        x = load_rows(x_ptr, places, x_row, own, length)
        b = load_rows(b_ptr, places, b_row, n, length)
        weighted = (x * left[:, None]).to(x.dtype)
        state = state * kept + tl.dot(tl.trans(weighted), b, input_precision=precision)


@triton.jit
def _outputs(
    x_ptr, dt_ptr, rate_ptr, skip_ptr, b_ptr, c_ptr, documents_ptr, states_ptr, y_ptr,
    length, heads, heads_of_group, chunks, x_row, x_batch, b_row, b_batch, c_row, c_batch,
    size: tl.constexpr, channels: tl.constexpr, numbers: tl.constexpr,
    documented: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    """y: (b, l, heads, p)."""
    batch, chunk = tl.program_id(0).to(tl.int64) // chunks, tl.program_id(0) % chunks
    head = tl.program_id(1)
    p, n = tl.arange(0, channels), tl.arange(0, numbers)
    start = chunk * size
    dt_ptr += batch * length * heads + head
    group = head // heads_of_group
    places, dt, sums = decays_of_chunk(dt_ptr, tl.load(rate_ptr + head), start, length, heads, size)
    x = load_rows(x_ptr + batch * x_batch + head * channels, places, x_row, p, length)
    b = load_rows(b_ptr + batch * b_batch + group * numbers, places, b_row, n, length)
    c = load_rows(c_ptr + batch * c_batch + group * numbers, places, c_row, n, length)
    seen, _, from_state = seen_between(
        documents_ptr + batch * length, places, start, length, sums, 0.0, size, documented
    )
    scores = tl.dot(c, tl.trans(b), input_precision=precision)
    weights = (scores * decay_between(sums, seen) * dt[None, :]).to(x.dtype)
    y = tl.dot(weights, x, input_precision=precision)
    number = (batch * chunks + chunk) * heads + head
    state = tl.load(states_ptr + number * channels * numbers + p[:, None] * numbers + n[None, :])
    y += tl.dot(c, tl.trans(state), input_precision=precision) * from_state[:, None]
    y += tl.load(skip_ptr + head) * x.to(tl.float32)
    out = y_ptr + ((batch * length + places[:, None]) * heads + head) * channels + p[None, :]
    tl.store(out, y.to(y_ptr.dtype.element_ty), mask=(places < length)[:, None])


@triton.jit
def seen_between(
    documents_ptr, places, start, length, sums, total, size: tl.constexpr, documented: tl.constexpr
):
    """(q, q) whether a token sees another of its chunk; (q) what is left of a token in the state
    behind the chunk; (q) what a token sees of the state before."""
    q = tl.arange(0, size)
    seen = q[:, None] >= q[None, :]
    left, read = tl.exp(total - sums), tl.exp(sums)
    if documented:
        own = tl.load(documents_ptr + places, mask=places < length, other=-1)
        seen = seen & (own[:, None] == own[None, :])
        left = tl.where(own == last_document(documents_ptr, start, length, size), left, 0.0)
        before = last_document(documents_ptr, start - size, length, size)
        read = tl.where(own == before, read, 0.0)
    return seen, left, read


@triton.jit
def decay_between(sums, seen):
    """(q, q) what is left of a token for a later one."""
    return tl.exp(tl.where(seen, sums[:, None] - sums[None, :], float("-inf")))


class Sequence:
    """The arguments that all kernels share.

    x: (b, l, g, r, p). dt: (b, l, g, r) fp32. rate: (g, r) fp32, below 0. skip: (g, r) fp32. b, c:
    (b, l, g, n). documents: (b, l) ascending numbers."""

    def __init__(
        self,
        x: Tensor,
        dt: Tensor,
        rate: Tensor,
        skip: Tensor,
        b: Tensor,
        c: Tensor,
        documents: Tensor | None,
    ) -> None:
        self.x, self.b, self.c = (_rows(tensor) for tensor in (x, b, c))
        self.dt, self.rate, self.skip = dt.contiguous(), rate.contiguous(), skip.contiguous()
        self.batch, self.length, self.groups, of_group, self.channels = x.shape
        self.heads, self.of_group = self.groups * of_group, of_group
        self.numbers, self.chunks = b.shape[-1], triton.cdiv(self.length, CHUNK)
        self.is_documented = documents is not None
        # Never read if there are none.
        self.documents = self.dt if documents is None else documents.contiguous()
        self.strides = tuple(v.stride(i) for v in (self.x, self.b, self.c) for i in (1, 0))
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
            *(self.length, self.heads, self.of_group, self.chunks, *self.strides[:4]),
            block=self.block,
            **self.sizes,
            **STATE_LOOP,
        )
        return states


def ssd_forward(of: Sequence) -> Tensor:
    """y like x, contiguous, from a state of 0."""
    y = torch.empty_like(of.x, memory_format=torch.contiguous_format)
    _outputs[(of.batch * of.chunks, of.heads)](
        *(of.x, of.dt, of.rate, of.skip, of.b, of.c, of.documents, of.states(), y),
        *(of.length, of.heads, of.of_group, of.chunks, *of.strides),
        **of.sizes,
    )
    return y


def _rows(x: Tensor) -> Tensor:
    """With all that belongs to a token beside each other."""
    return x if x[0, 0].is_contiguous() else x.contiguous()
