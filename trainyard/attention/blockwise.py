"""Attention as a list of blocks of queries and keys on one rank, with a sink.

One opaque operator for `torch.compile`.

b batch, n query heads, g key and value heads, s queries, t keys, d head channels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainyard.attention.base import Softmax
from trainyard.attention.lse_kernels import BlockCall, Parts, Saved, block_backward, block_forward
from trainyard.attention.merge_lse import (
    Merger,
    empty_gradients,
    empty_sequence_major,
    sequence_major,
)
from trainyard.attention.operator_gradient import register_gradient


class AttentionBlock(NamedTuple):
    """A range of queries and the keys they see: all, or (a square block) causally."""

    query_begin: int
    query_end: int
    key_begin: int
    key_end: int
    causal: bool = False

    @property
    def queries(self) -> slice:
        """The rows of queries."""
        return slice(self.query_begin, self.query_end)

    @property
    def keys(self) -> slice:
        """The rows of keys."""
        return slice(self.key_begin, self.key_end)

    def forward(self, kernel: str, q: Tensor, k: Tensor, v: Tensor, call: BlockCall) -> Parts:
        """`block_forward` of its rows."""
        keys, values = k[:, :, self.keys], v[:, :, self.keys]
        call = replace(call, causal=self.causal)
        return block_forward(kernel, q[:, :, self.queries], keys, values, call)

    def backward(self, kernel: str, dout: Tensor, saved: Saved, call: BlockCall) -> Parts:
        """`block_backward` of its rows; the dropout state is already that of the block."""
        q, k, v, out, lse, rng = saved
        q, dout, out, lse = (x[:, :, self.queries] for x in (q, dout, out, lse))
        rows = Saved(q, k[:, :, self.keys], v[:, :, self.keys], out, lse, rng)
        return block_backward(kernel, dout, rows, replace(call, causal=self.causal))


def causal_blocks(query_begin: int, query_end: int, first_position: int) -> list[AttentionBlock]:
    """Queries at consecutive positions, the first at `first_position`: the keys before it in whole,
    those from it on along the diagonal."""
    end = first_position + query_end - query_begin
    diagonal = AttentionBlock(query_begin, query_end, first_position, end, causal=True)
    if first_position == 0:
        return [diagonal]
    return [AttentionBlock(query_begin, query_end, 0, first_position), diagonal]


def block_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: Sequence[AttentionBlock],
    kernel: str,
    softmax: Softmax,
    *,
    mask: Tensor | None = None,
    window: tuple[int, int] = (-1, -1),
) -> Tensor:
    """Softmax attention of each query over the keys of all its blocks.

    q: (b, n, s, d); k, v: (b, g, t, d). mask, window: of a single block, as in
    `BlockCall`. Returns (b, n, s, d)."""
    assert len(blocks) == 1 or (mask is None and window == (-1, -1))
    plan = [int(number) for block in blocks for number in block]
    assert softmax.bias is None, "not chosen with relative positions"
    scale, dropout_p, sink, _ = softmax
    out: Tensor = _FORWARD(q, k, v, sink, mask, plan, kernel, scale, dropout_p, *window)[0]
    return out


def _blocks(plan: Sequence[int]) -> Iterator[AttentionBlock]:
    for i in range(0, len(plan), 5):
        q_begin, q_end, k_begin, k_end, causal = plan[i : i + 5]
        yield AttentionBlock(q_begin, q_end, k_begin, k_end, bool(causal))


@torch.library.custom_op(
    "trainyard::block_attention",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor? sink, Tensor? mask, int[] plan, str kernel, "
    "float scale, float dropout_p, int left, int right) -> (Tensor, Tensor, Tensor)",
)
def _forward(
    q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, mask: Tensor | None, *constants: Any
) -> Parts:
    plan, kernel, scale, dropout_p, left, right = constants
    call = BlockCall(scale, False, dropout_p, left, right, mask)
    merger, states = Merger(q, v.shape[3]), []
    for block in _blocks(plan):
        out, lse, rng = block.forward(kernel, q, k, v, call)
        merger.add(out, lse, block.queries)
        states.append(rng)
    return (*merger.result(sink), torch.stack(states))


@torch.library.custom_op(
    "trainyard::block_attention_backward",
    mutates_args=(),
    schema="(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor rng, "
    "Tensor? mask, int[] plan, str kernel, float scale, float dropout_p, int left, int right) "
    "-> (Tensor, Tensor, Tensor)",
)
def _backward(dout: Tensor, *inputs: Any) -> Parts:
    saved, (mask, plan, kernel, scale, dropout_p, left, right) = Saved(*inputs[:6]), inputs[6:]
    call = BlockCall(scale, False, dropout_p, left, right, mask)
    blocks = list(_blocks(plan))
    sums = [GradientSum(x, len(blocks) > 1) for x in saved[:3]]
    for block, state in zip(blocks, saved.rng, strict=True):
        parts = block.backward(kernel, dout, saved._replace(rng=state), call)
        rows = (block.queries, block.keys, block.keys)
        for total, part, place in zip(sums, parts, rows, strict=True):
            total.add(part, place)
    dq, dk, dv = (total.result() for total in sums)
    return dq, dk, dv


class GradientSum:
    """The sum of what blocks add to a gradient, in fp32 where there are several."""

    def __init__(self, like: Tensor, several: bool) -> None:
        self._dtype = like.dtype
        self._sum: Tensor | None = None
        if several:
            wide = torch.float64 if like.dtype == torch.float64 else torch.float32
            self._sum = torch.zeros(like.shape, dtype=wide, device=like.device)

    def add(self, part: Tensor, rows: slice) -> None:
        """Add (b, n, rows, d) to its rows."""
        if self._sum is None:
            self._sum = part
        else:
            self._sum[:, :, rows] += part

    def result(self) -> Tensor:
        """The sum in the dtype of the tensor whose gradient it is."""
        assert self._sum is not None
        return sequence_major(self._sum.to(self._dtype))


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, sink: Any, mask: Any, plan: list[int], *rest: Any) -> Any:
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    states = q.new_empty(len(plan) // 5, 2, dtype=torch.int64)
    return empty_sequence_major(q, v.shape[3]), q.new_empty(q.shape[:3], dtype=wide), states


_backward.register_fake(empty_gradients)

# Typed by hand: torch.ops is filled as operators are registered.
_FORWARD: Any = torch.ops.trainyard.block_attention
register_gradient(_forward, torch.ops.trainyard.block_attention_backward, num_tensors=5)
