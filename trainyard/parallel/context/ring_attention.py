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

from trainyard.attention.base import Softmax
from trainyard.attention.blockwise import AttentionBlock, GradientSum
from trainyard.attention.lse_kernels import BlockCall, Parts, Saved
from trainyard.attention.merge_lse import (
    Merger,
    empty_gradients,
    empty_sequence_major,
    sequence_major,
)
from trainyard.attention.operator_gradient import register_gradient


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: ProcessGroup,
    *,
    kernel: str,
    causal: bool,
    softmax: Softmax,
) -> Tensor:
    """Attention of the local queries over the keys of all ranks.

    q: (b, n, s, d); k, v: (b, g, s, d); pieces `rank` and `2 size - 1 - rank` of the sequence, in
    this order. Returns (b, n, s, d)."""
    assert softmax.bias is None, "not chosen with relative positions"
    name, (scale, dropout_p, sink, _) = group.group_name, softmax
    out: Tensor = _FORWARD(q, k, v, sink, name, kernel, causal, scale, dropout_p)[0]
    return out


def ring_block(step: int, rank: int, size: int, s: int, causal: bool) -> AttentionBlock:
    """The block that a rank computes at a step, with the keys of rank (rank - step) mod size."""
    half, source = s // 2, (rank - step) % size
    if not causal:
        return AttentionBlock(0, s, 0, s)
    if source == rank:
        return AttentionBlock(0, s, 0, s, causal=True)  # both pieces in their order: plainly causal
    if source < rank:
        return AttentionBlock(0, s, 0, half)
    return AttentionBlock(half, s, 0, s)


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
    q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, group: str, *constants: Any
) -> Parts:
    kernel, causal, scale, dropout_p = constants
    ring, call = _Ring(group), BlockCall(scale, dropout_p=dropout_p)
    merger, states = Merger(q, v.shape[3]), []
    message = _pack(k, v)
    for step in range(ring.size):
        pending = ring.pass_on(message) if step + 1 < ring.size else None
        block = ring_block(step, ring.rank, ring.size, q.shape[2], causal)
        out, lse, rng = block.forward(kernel, q, *_unpack(message, k, v), call)
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
def _backward(dout: Tensor, *inputs: Any) -> Parts:
    saved, (group, kernel, causal, scale, dropout_p) = Saved(*inputs[:6]), inputs[6:]
    q, k, v = saved[:3]
    ring, call = _Ring(group), BlockCall(scale, dropout_p=dropout_p)
    dq, message = GradientSum(q, several=True), _pack(k, v)
    wide = torch.promote_types(k.dtype, torch.float32)  # one rounding, not one per rank
    gradients, returning = torch.zeros(message.shape, dtype=wide, device=k.device), None
    for step in range(ring.size):
        pending = ring.pass_on(message) if step + 1 < ring.size else None
        block = ring_block(step, ring.rank, ring.size, q.shape[2], causal)
        keys, values = _unpack(message, k, v)
        step_saved = saved._replace(k=keys, v=values, rng=saved.rng[step])
        dq_part, dk_part, dv_part = block.backward(kernel, dout, step_saved, call)
        dq.add(dq_part, block.queries)
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


_backward.register_fake(empty_gradients)

# Typed by hand: torch.ops is filled as operators are registered.
_FORWARD: Any = torch.ops.trainyard.ring_attention
register_gradient(_forward, torch.ops.trainyard.ring_attention_backward, num_tensors=4)
