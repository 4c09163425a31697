"""Attention as a list of blocks of queries and keys on one rank, with a sink.

One opaque operator for `torch.compile`.

b batch, n query heads, g key and value heads, s queries, t keys, d head channels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainyard.attention.lse_kernels import BlockCall, block_backward, block_forward, causal_call
from trainyard.attention.merge_lse import (
    Merger,
    empty_sequence_major,
    sequence_major,
    sink_gradient,
)


class Block(NamedTuple):
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


def causal_blocks(query_begin: int, query_end: int, first_position: int) -> list[Block]:
    """Queries at consecutive positions, the first at `first_position`: the keys before it in whole,
    those from it on along the diagonal."""
    end = first_position + query_end - query_begin
    diagonal = Block(query_begin, query_end, first_position, end, causal=True)
    if first_position == 0:
        return [diagonal]
    return [Block(query_begin, query_end, 0, first_position), diagonal]


def block_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: Sequence[Block],
    *,
    kernel: str,
    scale: float,
    dropout_p: float = 0.0,
    sink: Tensor | None = None,
    mask: Tensor | None = None,
    window: tuple[int, int] = (-1, -1),
) -> Tensor:
    """Softmax attention of each query over the keys of all its blocks.

    q: (b, n, s, d); k, v: (b, g, t, d). sink: (n) scores that give no value. mask, window: of a
    single block, as in `BlockCall`. Returns (b, n, s, d)."""
    assert len(blocks) == 1 or (mask is None and window == (-1, -1))
    plan = [int(number) for block in blocks for number in block]
    out: Tensor = _FORWARD(q, k, v, sink, mask, plan, kernel, scale, dropout_p, *window)[0]
    return out


def _blocks(plan: Sequence[int]) -> Iterator[Block]:
    for i in range(0, len(plan), 5):
        q_begin, q_end, k_begin, k_end, causal = plan[i : i + 5]
        yield Block(q_begin, q_end, k_begin, k_end, bool(causal))


@torch.library.custom_op(
    "trainyard::block_attention",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor? sink, Tensor? mask, int[] plan, str kernel, "
    "float scale, float dropout_p, int left, int right) -> (Tensor, Tensor, Tensor)",
)
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    mask: Tensor | None,
    plan: list[int],
    kernel: str,
    scale: float,
    dropout_p: float,
    left: int,
    right: int,
) -> tuple[Tensor, Tensor, Tensor]:
    call = BlockCall(scale, False, dropout_p, left, right, mask)
    merger, states = Merger(q, v.shape[3]), []
    for block in _blocks(plan):
        keys, values = k[:, :, block.keys], v[:, :, block.keys]
        queries = q[:, :, block.queries]
        out, lse, rng = block_forward(
            kernel, queries, keys, values, causal_call(call, block.causal)
        )
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
def _backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    rng: Tensor,
    mask: Tensor | None,
    plan: list[int],
    kernel: str,
    scale: float,
    dropout_p: float,
    left: int,
    right: int,
) -> tuple[Tensor, Tensor, Tensor]:
    call = BlockCall(scale, False, dropout_p, left, right, mask)
    blocks = list(_blocks(plan))
    sums = [GradientSum(x, len(blocks) > 1) for x in (q, k, v)]
    for block, state in zip(blocks, rng, strict=True):
        rows, keys = block.queries, block.keys
        parts = block_backward(
            kernel,
            dout[:, :, rows],
            q[:, :, rows],
            k[:, :, keys],
            v[:, :, keys],
            out[:, :, rows],
            lse[:, :, rows],
            state,
            causal_call(call, block.causal),
        )
        for total, part, place in zip(sums, parts, (rows, keys, keys), strict=True):
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


@_backward.register_fake
def _(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Any:
    return tuple(empty_sequence_major(x, x.shape[3]) for x in (q, k, v))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, sink, mask, *constants = inputs
    ctx.save_for_backward(q, k, v, sink, mask, *output)
    ctx.constants = constants


def _autograd(ctx: Any, dout: Tensor, dlse: Any, drng: Any) -> tuple[Any, ...]:
    q, k, v, sink, mask, out, lse, rng = ctx.saved_tensors
    dq, dk, dv = _BACKWARD(dout, q, k, v, out, lse, rng, mask, *ctx.constants)
    dsink = None
    if sink is not None and ctx.needs_input_grad[3]:
        dsink = sink_gradient(dout, out, lse, sink)
    return dq, dk, dv, dsink, None, *([None] * len(ctx.constants))


_forward.register_autograd(_autograd, setup_context=_setup)

# Typed by hand: torch.ops is filled as operators are registered.
_FORWARD: Any = torch.ops.trainyard.block_attention
_BACKWARD: Any = torch.ops.trainyard.block_attention_backward
