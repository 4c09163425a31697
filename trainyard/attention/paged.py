"""Attention of the new tokens of many sequences to keys and values in blocks.

The new tokens of all sequences stand behind one another in one row, and each sequence has a table
of the blocks that hold its keys. Here in torch, which copies the blocks of sequences together
first.

T new tokens of all sequences, R sequences, n query heads, g key and value heads, d head channels,
d_v channels of a value, N blocks, B tokens of a block, M blocks of the longest sequence."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from trainyard.attention.base import Softmax
from trainyard.attention.masks import AttentionMask, rule_matrix
from trainyard.attention.one_query import one_query_attention
from trainyard.attention.sdpa import SdpaBackend


class PagedLayout(NamedTuple):
    """Where the new tokens of a step belong."""

    positions: Tensor
    """(1, T) int64, of each token in its sequence."""
    slots: Tensor
    """(T) int64, where its key and value go: block x B + place in the block."""
    tables: Tensor
    """(R, M) int64, the blocks of each sequence in order; behind its last one anything."""
    starts: Tensor
    """(R + 1) int64, where the tokens of each sequence begin."""
    lengths: Tensor
    """(R) int64, keys of each sequence with the new ones."""
    counts: tuple[int, ...]
    """New tokens of each sequence; fixed where a step is recorded."""
    most_keys: int
    """Of a sequence, at most."""


def paged_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    layout: PagedLayout,
    softmax: Softmax,
    window: tuple[int, int] | None,
) -> Tensor:
    """Causal attention of each new token to its sequence, whose keys are stored already.

    q: (T, n, d); keys: (N, B, g, d); values: (N, B, g, d_v), query head i reading group i g / n.
    window: see `AttentionMask`. Returns (T, n, d_v)."""
    assert not softmax.dropout_p, "a cache is not for training"
    assert softmax.bias is None, "no model with relative positions has a paged cache"
    return gathered_attention(q, keys, values, layout, softmax, window)


def gathered_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    layout: PagedLayout,
    softmax: Softmax,
    window: tuple[int, int] | None,
) -> Tensor:
    """`paged_attention` over copies of the blocks: sequences with equally many new tokens are one
    batch, whose keys are padded to the longest."""
    out = q.new_empty(*q.shape[:2], values.shape[3])
    for count in dict.fromkeys(layout.counts):
        rows = [row for row, other in enumerate(layout.counts) if other == count]
        own = torch.tensor(rows, device=q.device)
        most = int(layout.lengths[own].max())
        blocks = layout.tables[own, : -(-most // keys.shape[1])]
        # (r, g, t, d) of r sequences
        k, v = (x[blocks].flatten(1, 2)[:, :most].transpose(1, 2) for x in (keys, values))
        places = layout.starts[own].unsqueeze(1) + torch.arange(count, device=q.device)
        queries = q[places].transpose(1, 2)  # (r, n, s, d)
        mask = AttentionMask(window=window, positions=layout.positions[0, places])
        out[places] = _attend(queries, k, v, mask, softmax).transpose(1, 2)
    return out


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, softmax: Softmax) -> Tensor:
    """Later keys and the padding are behind the positions of the queries, and so masked."""
    if q.shape[2] == 1 and softmax.sink is None:
        assert mask.positions is not None
        keys = torch.arange(k.shape[2], device=q.device)
        return one_query_attention(q, k, v, rule_matrix(mask, mask.positions, keys), softmax.scale)
    backend = SdpaBackend("math" if q.is_cuda else "cpu")
    return backend.attend(q, k, v, mask, softmax)
