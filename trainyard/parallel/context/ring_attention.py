"""Ring attention: keys and values travel around the context-parallel ranks while queries stay
(arXiv:2310.01889), with causal work balanced as in split.py.

At each step a rank computes its queries with its current keys while it sends these on and receives
the next. With two symmetric pieces per rank, a step needs either all queries and the first half of
the keys, or the second half of the queries and all keys: every step but the first costs the same on
every rank. In the backward pass the gradients of keys and values follow them around the ring.

One operator for `torch.compile`. b batch, n query heads, g key and value heads, s local tokens, d
head channels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, distributed_c10d

from trainyard.attention.blockwise import Block, GradientSum
from trainyard.attention.lse_kernels import BlockCall, block_backward, block_forward, causal_call
from trainyard.attention.merge_lse import (
    Merger,
    empty_sequence_major,
    sequence_major,
    sink_gradient,
)


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: ProcessGroup,
    *,
    kernel: str,
    causal: bool,
    scale: float,
    dropout_p: float = 0.0,
    sink: Tensor | None = None,
) -> Tensor:
    """Attention of the local queries over the keys of all ranks.

    q: (b, n, s, d); k, v: (b, g, s, d); pieces `rank` and `2 size - 1 - rank` of the sequence, in
    this order. sink: (n). Returns (b, n, s, d)."""
    name = group.group_name
    out: Tensor = _FORWARD(q, k, v, sink, name, kernel, causal, scale, dropout_p)[0]
    return out


def ring_block(step: int, rank: int, size: int, s: int, causal: bool) -> Block:
    """The block that a rank computes at a step, with the keys of rank (rank - step) mod size."""
    half, source = s // 2, (rank - step) % size
    if not causal:
        return Block(0, s, 0, s)
    if source == rank:
        return Block(0, s, 0, s, causal=True)  # both pieces in their order: plainly causal
    if source < rank:
        return Block(0, s, 0, half)
    return Block(half, s, 0, s)


# --- passing on -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Pending:
    """A message on its way in, and the one out, whose memory has to live until both are done."""

    received: Tensor
    sent: Tensor
    works: list[Any]

    def wait(self) -> Tensor:
        for work in self.works:
            work.wait()
        return self.received


class _Ring:
    """This rank's neighbours."""

    def __init__(self, group_name: str) -> None:
        registry: Any = distributed_c10d  # operators take names of groups
        self._group = registry._resolve_process_group(group_name)
        self.size, self.rank = dist.get_world_size(self._group), dist.get_rank(self._group)

    def pass_on(self, message: Tensor) -> _Pending:
        """Begin to send to the next rank and to receive as much from the one before."""
        received = torch.empty_like(message)
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, message, self._peer(1), self._group),
                dist.P2POp(dist.irecv, received, self._peer(-1), self._group),
            ]
        )
        return _Pending(received, message, list(works))

    def _peer(self, distance: int) -> int:
        return dist.get_global_rank(self._group, (self.rank + distance) % self.size)


def _pack(k: Tensor, v: Tensor) -> Tensor:
    """One message of both."""
    return torch.cat((k.flatten(), v.flatten()))


def _unpack(message: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Both, in the shapes of `k` and `v`; views of the message."""
    keys, values = message.split((k.numel(), v.numel()))
    return keys.view(k.shape), values.view(v.shape)


# --- the operator -----------------------------------------------------------------------------


@torch.library.custom_op(
    "trainyard::ring_attention",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor? sink, str group, str kernel, bool causal, "
    "float scale, float dropout_p) -> (Tensor, Tensor, Tensor)",
)
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    group: str,
    kernel: str,
    causal: bool,
    scale: float,
    dropout_p: float,
) -> tuple[Tensor, Tensor, Tensor]:
    ring, call = _Ring(group), BlockCall(scale, dropout_p=dropout_p)
    merger, states = Merger(q, v.shape[3]), []
    message = _pack(k, v)
    for step in range(ring.size):
        pending = ring.pass_on(message) if step + 1 < ring.size else None
        block = ring_block(step, ring.rank, ring.size, q.shape[2], causal)
        keys, values = (x[:, :, block.keys] for x in _unpack(message, k, v))
        queries = q[:, :, block.queries]
        out, lse, rng = block_forward(
            kernel, queries, keys, values, causal_call(call, block.causal)
        )
        merger.add(out, lse, block.queries)
        states.append(rng)
        if pending is not None:
            message = pending.wait()
    return (*merger.result(sink), torch.stack(states))


@torch.library.custom_op(
    "trainyard::ring_attention_backward",
    mutates_args=(),
    schema="(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor rng, "
    "str group, str kernel, bool causal, float scale, float dropout_p) "
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
    group: str,
    kernel: str,
    causal: bool,
    scale: float,
    dropout_p: float,
) -> tuple[Tensor, Tensor, Tensor]:
    ring, call = _Ring(group), BlockCall(scale, dropout_p=dropout_p)
    dq, message = GradientSum(q, several=True), _pack(k, v)
    wide = torch.promote_types(k.dtype, torch.float32)  # one rounding, not one per rank
    gradients, returning = torch.zeros(message.shape, dtype=wide, device=k.device), None
    for step in range(ring.size):
        pending = ring.pass_on(message) if step + 1 < ring.size else None
        block = ring_block(step, ring.rank, ring.size, q.shape[2], causal)
        rows = block.queries
        keys, values = (x[:, :, block.keys] for x in _unpack(message, k, v))
        dq_part, dk_part, dv_part = block_backward(
            kernel,
            dout[:, :, rows],
            q[:, :, rows],
            keys,
            values,
            out[:, :, rows],
            lse[:, :, rows],
            rng[step],
            causal_call(call, block.causal),
        )
        dq.add(dq_part, rows)
        if returning is not None:
            gradients = returning.wait()
        dk, dv = _unpack(gradients, k, v)
        dk[:, :, block.keys] += dk_part
        dv[:, :, block.keys] += dv_part
        returning = ring.pass_on(gradients)
        if pending is not None:
            message = pending.wait()
    assert returning is not None
    dk, dv = _unpack(returning.wait(), k, v)
    return dq.result(), sequence_major(dk.to(k.dtype)), sequence_major(dv.to(v.dtype))


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, sink: Any, group: str, *rest: Any) -> Any:
    wide = torch.promote_types(q.dtype, torch.float32)
    states = q.new_empty(_Ring(group).size, 2, dtype=torch.int64)
    return empty_sequence_major(q, v.shape[3]), q.new_empty(q.shape[:3], dtype=wide), states


@_backward.register_fake
def _(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Any:
    return tuple(empty_sequence_major(x, x.shape[3]) for x in (q, k, v))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, sink, *constants = inputs
    ctx.save_for_backward(q, k, v, sink, *output)
    ctx.constants = constants


def _autograd(ctx: Any, dout: Tensor, dlse: Any, drng: Any) -> tuple[Any, ...]:
    q, k, v, sink, out, lse, rng = ctx.saved_tensors
    dq, dk, dv = _BACKWARD(dout, q, k, v, out, lse, rng, *ctx.constants)
    dsink = None
    if sink is not None and ctx.needs_input_grad[3]:
        dsink = sink_gradient(dout, out, lse, sink)
    return dq, dk, dv, dsink, *([None] * len(ctx.constants))


_forward.register_autograd(_autograd, setup_context=_setup)

# Typed by hand: torch.ops is filled as operators are registered.
_FORWARD: Any = torch.ops.trainyard.ring_attention
_BACKWARD: Any = torch.ops.trainyard.ring_attention_backward
