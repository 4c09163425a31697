"""Attention in plain torch, the reference of the kernels: two products and a softmax.

b batch, n query heads, g key and value heads, s queries, t keys, d head channels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from trainyard.attention.base import Numerics, Softmax
from trainyard.attention.masks import AttentionMask, materialise


@dataclass(frozen=True, slots=True)
class LocalBackend:
    """Plain attention, with all scores of a layer in memory at once."""

    numerics: Numerics

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, softmax: Softmax
    ) -> Tensor:
        """See `AttentionBackend`."""
        g, coefficient = k.shape[1], self.numerics.layer_scaling
        grouped = q.unflatten(1, (g, -1))  # (b, g, n/g, s, d)
        scores = grouped * (softmax.scale / coefficient) @ k.unsqueeze(2).transpose(-1, -2)
        if self.numerics.softmax_in_fp32 or coefficient != 1:
            scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        if coefficient != 1:
            scores = scores * coefficient
        if softmax.bias is not None:
            scores = scores + softmax.bias.to(scores.dtype).unflatten(1, (g, -1))
        allowed = materialise(mask, q.shape[2], k.shape[2], q.device)
        if allowed is not None:
            lowest = torch.finfo(scores.dtype).min  # not -inf: a row of none would be NaN
            scores = scores.masked_fill(~allowed.unsqueeze(1), lowest)
        weights = _softmax(scores, softmax.sink).to(q.dtype)
        weights = functional.dropout(weights, softmax.dropout_p)
        return (weights @ v.unsqueeze(2)).flatten(1, 2)


def _softmax(scores: Tensor, sink: Tensor | None) -> Tensor:
    """Over the keys, and the sink, which is left out of the result. scores: (b, g, n/g, s, t)."""
    if sink is None:
        return scores.softmax(dim=-1)
    column = sink.to(scores.dtype).view(1, *scores.shape[1:3], 1, 1)
    column = column.expand(*scores.shape[:-1], 1)
    return torch.cat((scores, column), dim=-1).softmax(dim=-1)[..., :-1]
