"""Combines attention over parts of the keys, and adds the sink of a softmax.

A sink is an extra key of each head with its own score and a value of 0: it takes a share of the
probability and contributes nothing (`--softmax-type learnable`; a score of 0 is "off-by-one"). The
backward passes of lse_kernels.py are correct once output and log-sum-exp include it.

b batch, n query heads, s queries, d head channels."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


class Merger:
    """Output and log-sum-exp so far, in fp32; a first block that covers all queries is not
    copied."""

    def __init__(self, q: Tensor, value_dim: int) -> None:
        self._shape = (*q.shape[:3], value_dim)
        self._dtype = q.dtype
        self._wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        self._device = q.device
        self._out: Tensor | None = None
        self._lse: Tensor | None = None

    def add(self, out: Tensor, lse: Tensor, rows: slice) -> None:
        """Take in what queries `rows` found in other keys: (b, n, rows, d) and (b, n, rows)."""
        if self._out is None and lse.shape[2] == self._shape[2]:
            self._out, self._lse = out, lse
            return
        if self._out is None:
            self._out = torch.zeros(self._shape, dtype=self._wide, device=self._device)
            self._lse = torch.full(
                self._shape[:3], -math.inf, dtype=self._wide, device=self._device
            )
        assert self._lse is not None
        if self._out.dtype != self._wide or self._lse.dtype != self._wide:
            self._out, self._lse = self._out.to(self._wide), self._lse.to(self._wide)
        old_out, old_lse = self._out[:, :, rows], self._lse[:, :, rows]
        total = torch.logaddexp(old_lse, lse)
        # out + share of the new x (new - out): one product fewer than two weighted terms
        share = (lse - total).exp().unsqueeze(-1)
        merged = torch.lerp(old_out, out.to(self._wide), share)
        if merged.shape == self._out.shape:
            self._out, self._lse = merged, total
        else:
            old_out.copy_(merged)
            old_lse.copy_(total)

    def result(self, sink: Tensor | None) -> tuple[Tensor, Tensor]:
        """Output in the dtype of the queries and log-sum-exp in fp32, the sink included."""
        assert self._out is not None
        assert self._lse is not None
        out, lse = self._out, self._lse.to(self._wide)
        if sink is not None:
            total = torch.logaddexp(lse, sink.to(lse.dtype).view(1, -1, 1))
            out = out.to(self._wide) * (lse - total).exp().unsqueeze(-1)
            lse = total
        return sequence_major(out.to(self._dtype)), lse.contiguous()


def sequence_major(x: Tensor) -> Tensor:
    """The same (b, n, s, d), laid out as (s, b, n, d): the next matrix then reads it as it is."""
    return x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)


def empty_sequence_major(x: Tensor, channels: int) -> Tensor:
    """What `sequence_major` returns for a tensor like `x`, (b, n, s, d), with other channels."""
    b, n, s, _ = x.shape
    return x.new_empty(s, b, n, channels).permute(1, 2, 0, 3)


def empty_gradients(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    """The shapes of what a backward operator returns, for compilers."""
    return tuple(empty_sequence_major(x, x.shape[3]) for x in (q, k, v))


def sink_gradient(dout: Tensor, out: Tensor, lse: Tensor, sink: Tensor) -> Tensor:
    """Gradient of the sinks' scores, (n): minus their probability times rowsum(dout out)."""
    share = (sink.to(lse.dtype).view(1, -1, 1) - lse).exp()
    rows = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(dim=-1)
    return -(share * rows).sum(dim=(0, 2)).to(sink.dtype)
