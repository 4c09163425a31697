"""Attention kernels that return the log-sum-exp of their scores, and their backward passes.

The log-sum-exp lets attention over a part of the keys be combined with the rest. The backward pass
of a part needs only the output and log-sum-exp of the whole: probabilities are exp(score - lse),
and the gradient of a score is p (dp - rowsum(dout out)). So ring attention and a softmax with a
sink need no further kernels.

b batch, n query heads, g key and value heads, s queries, t keys, d head channels."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

Kernel = Literal["cudnn", "flash", "math", "cpu"]
KERNELS: tuple[Kernel, ...] = ("cudnn", "flash", "math", "cpu")

# Typed by hand: torch.ops is filled when torch is loaded.
_ATEN: Any = torch.ops.aten


@dataclass(frozen=True, slots=True)
class BlockCall:
    """What a block is computed with, besides its tensors."""

    scale: float
    causal: bool = False
    """Query i sees keys up to i; s = t."""
    dropout_p: float = 0.0
    window_left: int = -1
    window_right: int = -1
    """Keys to either side of a query, aligned at the last query and key; -1: all. `flash` alone."""
    mask: Tensor | None = None
    """(b or 1, 1, s, t) bool, True where a query may look; `math` and `cpu` alone."""


class Saved(NamedTuple):
    """Inputs and results of a forward pass, in the order in which its backward pass takes them."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    rng: Tensor


Parts = tuple[Tensor, Tensor, Tensor]
Forward = Callable[[Tensor, Tensor, Tensor, BlockCall], Parts]
Backward = Callable[[Tensor, Saved, BlockCall], Parts]


def block_forward(kernel: str, q: Tensor, k: Tensor, v: Tensor, call: BlockCall) -> Parts:
    """q: (b, n, s, d); k, v: (b, g, t, d). Returns out (b, n, s, d), lse (b, n, s) fp32 (fp64 of
    fp64) and what repeats its dropout, (2,) int64."""
    return FORWARD[kernel](q, k, v, call)


def block_backward(kernel: str, dout: Tensor, saved: Saved, call: BlockCall) -> Parts:
    """Gradients of q, k and v from this block; out and lse are those of all blocks together."""
    return BACKWARD[kernel](dout, saved, call)


def no_rng(device: torch.device) -> Tensor:
    """The state of a block without dropout."""
    return torch.zeros(2, dtype=torch.int64, device=device)


# --- cuDNN ------------------------------------------------------------------------------------


def _cudnn_forward(q: Tensor, k: Tensor, v: Tensor, call: BlockCall) -> Parts:
    made = _ATEN._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, call.dropout_p, call.causal, False, scale=call.scale
    )
    out, lse = made[0], made[1]
    rng = no_rng(q.device)
    if call.dropout_p > 0:
        rng = torch.stack((made[6].view(()), made[7].view(()))).to(torch.int64)
    return out, lse.reshape(lse.shape[:3]), rng


def _cudnn_backward(dout: Tensor, saved: Saved, call: BlockCall) -> Parts:
    q, k, v, out, lse, rng = saved
    # As its own forward gives them out: see `laid_out`.
    order = order_in_memory(q)
    dout, out = laid_out(dout, order), laid_out(out, order)
    # Called directly, its backward gives a wrong dq where heads share keys, too.
    per_group = q.shape[1] // k.shape[1]
    dq, dk, dv = _ATEN._scaled_dot_product_cudnn_attention_backward(
        dout,
        q,
        k.repeat_interleave(per_group, dim=1) if per_group > 1 else k,
        v.repeat_interleave(per_group, dim=1) if per_group > 1 else v,
        out,
        lse.contiguous().unsqueeze(-1),  # cuDNN's own shape, (b, n, s, 1)
        rng[0],
        rng[1],
        None,
        None,
        None,
        q.shape[2],
        k.shape[2],
        call.dropout_p,
        call.causal,
        scale=call.scale,
    )
    return dq, _over_group(dk, per_group), _over_group(dv, per_group)


def order_in_memory(x: Tensor) -> tuple[int, ...]:
    """The dimensions of x from the one with the longest strides to the one with the shortest."""
    strides = x.stride()
    return tuple(sorted(range(x.dim()), key=lambda dim: -strides[dim]))


def laid_out(x: Tensor, order: Sequence[int]) -> Tensor:
    """x, its dimensions without gaps in this order in memory; itself where they are.

    torch caches cuDNN's backward plans by the strides of q, k and v only. With another layout of
    out or dout it reuses a wrong plan, and dq is silently wrong (torch 2.11). So for the same q, k
    and v, out and dout always have one layout, the one that cuDNN gives `out`: q's order without
    gaps.

    By `contiguous`, and not by comparing strides: what Dynamo believes of the strides of a gradient
    would be compiled in, and the copy made every time."""
    places = [order.index(dim) for dim in range(len(order))]
    return x.permute(tuple(order)).contiguous().permute(places)


def _over_group(grad: Tensor, per_group: int) -> Tensor:
    """Add up what the heads of a group give to the key or value that they share."""
    if per_group == 1:
        return grad
    shared: Tensor = grad.unflatten(1, (-1, per_group))
    return shared.float().sum(dim=2).to(grad.dtype)


# --- FlashAttention-2, torch's own ------------------------------------------------------------


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, call: BlockCall) -> Parts:
    made = _ATEN._flash_attention_forward(
        *(x.transpose(1, 2) for x in (q, k, v)),  # (b, s, n, d)
        None,
        None,
        q.shape[2],
        k.shape[2],
        call.dropout_p,
        call.causal,
        False,
        scale=call.scale,
        **flash_window(call),
    )
    return made[0].transpose(1, 2), made[1], flash_rng(made[2], call)


def _flash_backward(dout: Tensor, saved: Saved, call: BlockCall) -> Parts:
    q, k, v, out, lse, rng = saved
    dq, dk, dv = _ATEN._flash_attention_backward(
        *(x.transpose(1, 2) for x in (dout.contiguous(), q, k, v, out)),
        lse.contiguous(),
        None,
        None,
        q.shape[2],
        k.shape[2],
        call.dropout_p,
        call.causal,
        rng.view(torch.uint64),
        torch.empty(0, device=q.device),
        scale=call.scale,
        **flash_window(call),
    )
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


def flash_window(call: BlockCall) -> dict[str, int | None]:
    """The window as torch's FlashAttention takes it."""
    left, right = call.window_left, call.window_right
    if call.causal and left >= 0:
        right = 0
    return {
        "window_size_left": None if left < 0 else left,
        "window_size_right": None if right < 0 else right,
    }


def flash_rng(state: Tensor, call: BlockCall) -> Tensor:
    """The state of the dropout's generator, (2,) int64; uint64 has no arithmetic elsewhere."""
    return state.view(torch.int64) if call.dropout_p > 0 else no_rng(state.device)


# --- on the CPU -------------------------------------------------------------------------------


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, call: BlockCall) -> Parts:
    if call.dropout_p > 0:
        return _math_forward(q, k, v, call)
    out, lse = _ATEN._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, call.causal, attn_mask=additive(call.mask, q.dtype), scale=call.scale
    )
    return out, lse, no_rng(q.device)


def _cpu_backward(dout: Tensor, saved: Saved, call: BlockCall) -> Parts:
    if call.dropout_p > 0:
        return _math_backward(dout, saved, call)
    q, k, v, out, lse, _ = saved
    dq, dk, dv = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward(
        *(dout, q, k, v, out, lse, 0.0, call.causal),
        attn_mask=additive(call.mask, q.dtype),
        scale=call.scale,
    )
    return dq, dk, dv


def additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """0 where a query may look, -inf elsewhere."""
    if mask is None:
        return None
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, -math.inf)


# --- plain torch ------------------------------------------------------------------------------


def _math_forward(q: Tensor, k: Tensor, v: Tensor, call: BlockCall) -> Parts:
    scores = _scores(q, k, call)  # (b, g, n/g, s, t)
    lse = scores.logsumexp(dim=-1)
    weights = (scores - lse.unsqueeze(-1)).exp().nan_to_num(0.0)  # nothing to look at: 0
    rng = no_rng(q.device)
    if call.dropout_p > 0:
        rng[0] = torch.randint(2**62, (), device=q.device)
        weights = weights * _kept(weights, rng, call.dropout_p)
    out = weights @ _wide(v).unsqueeze(2)
    return out.flatten(1, 2).to(q.dtype), lse.flatten(1, 2), rng


def _math_backward(dout: Tensor, saved: Saved, call: BlockCall) -> Parts:
    q, k, v, out, lse, rng = saved
    g = k.shape[1]
    wide_q, wide_dout, wide_out = (_grouped(_wide(x), g) for x in (q, dout, out))
    lse = lse.unflatten(1, (g, -1)).unsqueeze(-1)
    weights = (_scores(q, k, call) - lse).exp().nan_to_num(0.0)
    dweights = wide_dout @ _wide(v).unsqueeze(2).transpose(-1, -2)
    dropped = weights
    if call.dropout_p > 0:
        kept = _kept(weights, rng, call.dropout_p)
        dropped, dweights = weights * kept, dweights * kept
    dscores = weights * (dweights - (wide_dout * wide_out).sum(-1, keepdim=True)) * call.scale
    dq = (dscores @ _wide(k).unsqueeze(2)).flatten(1, 2)
    dk = (dscores.transpose(-1, -2) @ wide_q).sum(dim=2)
    dv = (dropped.transpose(-1, -2) @ wide_dout).sum(dim=2)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _scores(q: Tensor, k: Tensor, call: BlockCall) -> Tensor:
    """(b, g, n/g, s, t) in fp32 or wider, -inf where a query may not look."""
    g, s, t = k.shape[1], q.shape[2], k.shape[2]
    scores = _grouped(_wide(q), g) @ _wide(k).unsqueeze(2).transpose(-1, -2) * call.scale
    distance = torch.arange(t - s, t, device=q.device).unsqueeze(1) - torch.arange(
        t, device=q.device
    )
    right = 0 if call.causal else call.window_right
    if right >= 0:
        scores = scores.masked_fill(distance < -right, -math.inf)
    if call.window_left >= 0:
        scores = scores.masked_fill(distance > call.window_left, -math.inf)
    if call.mask is not None:
        scores = scores.masked_fill(~call.mask.unsqueeze(1), -math.inf)
    return scores


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _grouped(x: Tensor, g: int) -> Tensor:
    """(b, n, s, d) as (b, g, n/g, s, d)."""
    grouped: Tensor = x.unflatten(1, (g, -1))
    return grouped


def _kept(weights: Tensor, rng: Tensor, dropout_p: float) -> Tensor:
    """Factor of each weight: 0 where it was dropped, 1 / (1 - p) elsewhere."""
    generator = torch.Generator(weights.device).manual_seed(int(rng[0]))
    kept = torch.rand(
        weights.shape, generator=generator, device=weights.device, dtype=torch.float32
    )
    factor: Tensor = (kept >= dropout_p).to(weights.dtype) / (1.0 - dropout_p)
    return factor


FORWARD: dict[str, Forward] = {
    "cudnn": _cudnn_forward,
    "flash": _flash_forward,
    "math": _math_forward,
    "cpu": _cpu_forward,
}
BACKWARD: dict[str, Backward] = {
    "cudnn": _cudnn_backward,
    "flash": _flash_backward,
    "math": _math_backward,
    "cpu": _cpu_backward,
}
