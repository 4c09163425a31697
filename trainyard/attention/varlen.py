"""Attention over packed documents with torch's FlashAttention-2, windows and sinks included.

The kernel takes concatenated rows and the starts of documents, so no mask matrix is needed. CUDA
only. One operator for `torch.compile`.

b batch, n query heads, g key and value heads, s queries, t keys, d head channels, T = b s."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trainyard.attention.base import Softmax
from trainyard.attention.lse_kernels import BlockCall, Parts, Saved, flash_rng, flash_window
from trainyard.attention.operator_gradient import register_gradient

_ATEN: Any = torch.ops.aten


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_lengths: Tensor,
    key_lengths: Tensor,
    softmax: Softmax,
    *,
    causal: bool,
    window: tuple[int, int],
) -> Tensor:
    """q: (b, n, s, d); k, v: (b, g, t, d). query_lengths, key_lengths: int32 `cu_seqlens` of the
    documents, rows behind one another; within a document, the queries are the last of the keys.

    Returns (b, n, s, d)."""
    assert softmax.bias is None, "not chosen with relative positions"
    scale, dropout_p, sink, _ = softmax
    out: Tensor = _FORWARD(
        q, k, v, sink, query_lengths, key_lengths, causal, *window, scale, dropout_p
    )[0]
    return out


def _rows(x: Tensor) -> Tensor:
    """(b, n, s, d) as (b s, n, d)."""
    return x.transpose(1, 2).flatten(0, 1).contiguous()


def _heads(rows: Tensor, like: Tensor) -> Tensor:
    """(b s, n, d) as (b, n, s, d)."""
    heads: Tensor = rows.unflatten(0, (like.shape[0], like.shape[2])).transpose(1, 2)
    return heads


@torch.library.custom_op(
    "trainyard::varlen_attention",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor? sink, Tensor query_lengths, "
    "Tensor key_lengths, bool causal, int left, int right, float scale, float dropout_p) "
    "-> (Tensor, Tensor, Tensor)",
)
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    query_lengths: Tensor,
    key_lengths: Tensor,
    *constants: Any,
) -> Parts:
    causal, left, right, scale, dropout_p = constants
    call = BlockCall(scale, causal, dropout_p, left, right)
    made = _ATEN._flash_attention_forward(
        *(_rows(x) for x in (q, k, v)),
        *(query_lengths, key_lengths, q.shape[2], k.shape[2], dropout_p, causal, False),
        scale=scale,
        **flash_window(call),
    )
    out, lse = made[0], made[1]  # (T, n, d), (n, T) fp32
    if sink is not None:
        total = torch.logaddexp(lse, sink.to(lse.dtype).unsqueeze(1))
        out = (out * (lse - total).exp().t().unsqueeze(-1)).to(q.dtype)
        lse = total
    return _heads(out, q), lse, flash_rng(made[2], call)


@torch.library.custom_op(
    "trainyard::varlen_attention_backward",
    mutates_args=(),
    schema="(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor rng, "
    "Tensor query_lengths, Tensor key_lengths, bool causal, int left, int right, float scale, "
    "float dropout_p) -> (Tensor, Tensor, Tensor)",
)
def _backward(dout: Tensor, *inputs: Any) -> Parts:
    q, k, v, out, lse, rng = Saved(*inputs[:6])
    query_lengths, key_lengths, causal, left, right, scale, dropout_p = inputs[6:]
    call = BlockCall(scale, causal, dropout_p, left, right)
    dq, dk, dv = _ATEN._flash_attention_backward(
        *(_rows(x) for x in (dout, q, k, v, out)),
        lse.contiguous(),
        *(query_lengths, key_lengths, q.shape[2], k.shape[2], dropout_p, causal),
        rng.view(torch.uint64),
        torch.empty(0, device=q.device),
        scale=scale,
        **flash_window(call),
    )
    return _heads(dq, q), _heads(dk, k), _heads(dv, v)


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Any:
    b, n, s, _ = q.shape
    out = q.new_empty(b, s, n, v.shape[3]).transpose(1, 2)
    lse = q.new_empty(n, b * s, dtype=torch.float32)
    return out, lse, q.new_empty(2, dtype=torch.int64)


@_backward.register_fake
def _(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Any:
    return tuple(
        x.new_empty(x.shape[0], x.shape[2], x.shape[1], x.shape[3]).transpose(1, 2)
        for x in (q, k, v)
    )


def _sink_gradient(dout: Tensor, out: Tensor, lse: Tensor, sink: Tensor) -> Tensor:
    share = (sink.to(lse.dtype).unsqueeze(1) - lse).exp()  # (n, T)
    products = (dout.float() * out.float()).sum(dim=-1).transpose(0, 1).flatten(1)
    return -(share * products).sum(dim=1).to(sink.dtype)


# Typed by hand: torch.ops is filled as operators are registered.
_FORWARD: Any = torch.ops.trainyard.varlen_attention
register_gradient(_forward, torch.ops.trainyard.varlen_attention_backward, 6, _sink_gradient)
