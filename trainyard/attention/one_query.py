"""Attention of one query in each row to cached keys, as two batched products.

The queries of a group share its keys, which are read once and not repeated for each head: with one
query, attention takes as long as reading them. Masked kernels of torch repeat them, and split no
row among processors.

b batch, n query heads, g key and value heads, t keys, d head channels."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def one_query_attention(
    q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None, scale: float
) -> Tensor:
    """q: (b, n, 1, d); k, v: (b, g, t, d); allowed: (b or 1, 1, 1, t), True where a query may look.

    Softmax in fp32. Returns (b, n, 1, d)."""
    b, n, _, d = q.shape
    groups = k.shape[1]
    grouped = (q * scale).view(b, groups, n // groups, d)
    scores = torch.matmul(grouped, k.transpose(2, 3)).float()  # (b, g, n / g, t)
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -math.inf)
    weights = scores.softmax(dim=-1).to(v.dtype)
    return torch.matmul(weights, v).view(b, n, 1, v.shape[3])
