"""Attention masks as rules instead of matrices.

Kernels know causal attention, windows and documents; an (s, t) matrix is built only for kernels
that do not. Rules refer to positions. By default the s queries are the last s of the t keys, so
that a piece of a sequence with all keys before it needs no new rule.

s queries, t keys, b batch, w document bounds of a row."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

NO_BOUND = -1
"""An unbounded side of a window."""


@dataclass(frozen=True, slots=True)
class AttentionMask:
    """Rules that all have to allow a key."""

    causal: bool = True
    """No later keys."""
    window: tuple[int, int] | None = None
    """Number of keys to the left and right; `NO_BOUND`: any (--window-size)."""
    dense: Tensor | None = None
    """(b or 1, 1, s, t) bool, True for allowed keys."""
    bounds: Tensor | None = None
    """(b, w) starts of the documents of each row, ending with at least one entry t: the
    `cu_seqlens` of packed samples. No keys of other documents."""
    positions: Tensor | None = None
    """(b, s) positions of the queries among the keys; unset: the last s of them."""
    lengths: Tensor | None = None
    """(b) int64, for one query in each row: it sees the first so many keys, which `dense` says too;
    for a kernel that reads no further."""
    query_bounds: Tensor | None = None
    """(b, w) `bounds` of queries that are another sequence than the keys (cross-attention), where
    document i looks at document i of the keys; neither causal nor with a window."""

    @property
    def plain(self) -> bool:
        """Whether causality is the only rule, which every kernel supports."""
        return self.window is None and self.rules_only and self.bounds is None

    @property
    def rules_only(self) -> bool:
        """Whether kernels with windows and documents need no matrix."""
        return self.dense is None and self.positions is None

    def with_window(self, window: tuple[int, int] | None) -> AttentionMask:
        """This mask with the window of a layer."""
        return self if window is None else replace(self, window=window)

    def part(self, begin: int, end: int) -> AttentionMask:
        """The mask of keys `begin` to `end`, the last of which belong to the queries."""
        assert self.rules_only, "a matrix cannot be cut along the keys of other queries"
        if self.bounds is None:
            return self
        return replace(self, bounds=self.bounds.clamp(begin, end) - begin)

    def first_key(self, query: int) -> int:
        """No query from `query` on looks at a key before this one."""
        if self.window is None or self.window[0] == NO_BOUND:
            return 0
        return max(0, query - self.window[0])


CAUSAL = AttentionMask()
FULL = AttentionMask(causal=False)


def as_mask(mask: AttentionMask | Tensor | None) -> AttentionMask:
    """A mask from None (causal), a (b or 1, 1, s, t) matrix, or a mask."""
    if mask is None:
        return CAUSAL
    if isinstance(mask, Tensor):
        return AttentionMask(causal=False, dense=mask)
    return mask


def mask_of_padding(padding_mask: Tensor) -> AttentionMask:
    """Every token sees all tokens of its row, and padding only padding: two documents, which
    kernels know without a matrix. padding_mask: (b, s), 1 for tokens, then 0."""
    s = padding_mask.shape[1]
    lengths = padding_mask.sum(dim=1, dtype=torch.int32)
    bounds = torch.stack((torch.zeros_like(lengths), lengths, torch.full_like(lengths, s)), dim=1)
    return AttentionMask(causal=False, bounds=bounds)


def cross_mask(lengths: Tensor, s: int, t: int) -> AttentionMask:
    """Of cross-attention: every query sees the first keys of its row, and none sees its padding.

    lengths: (b) keys of each row, at least 1; s queries, t keys with their padding."""
    lengths = lengths.to(torch.int32)
    begin, all_queries, all_keys = (torch.full_like(lengths, x) for x in (0, s, t))
    return AttentionMask(
        causal=False,
        bounds=torch.stack((begin, lengths, all_keys), dim=1),
        query_bounds=torch.stack((begin, all_queries, all_queries), dim=1),
    )


def materialise(mask: AttentionMask, s: int, t: int, device: torch.device) -> Tensor | None:
    """The matrix of all rules, (b or 1, 1, s, t), True where a query may look; None: everywhere."""
    keys = torch.arange(t, device=device)
    queries = mask.positions
    if queries is None:
        queries = torch.arange(t - s, t, device=device).unsqueeze(0)
    parts = [rule_matrix(mask, queries, keys), mask.dense]
    if mask.bounds is not None:
        document = document_numbers(mask.bounds, t)  # (b, t)
        if mask.query_bounds is None:
            own = document.gather(1, queries.expand(document.shape[0], -1))
        else:
            own = document_numbers(mask.query_bounds, s)
        parts.append((own.unsqueeze(2) == document.unsqueeze(1)).unsqueeze(1))
    allowed: Tensor | None = None
    for part in parts:
        if part is not None:
            allowed = part if allowed is None else allowed & part
    return allowed


def rule_matrix(mask: AttentionMask, queries: Tensor, keys: Tensor) -> Tensor | None:
    """Causality and window for queries and keys at any positions.

    queries: (b or 1, s); keys: (t). Returns (b or 1, 1, s, t), or None where all is allowed."""
    distance = queries.unsqueeze(-1) - keys  # (b, s, t): above 0 for keys to the left
    left, right = mask.window or (NO_BOUND, NO_BOUND)
    if mask.causal:
        right = 0
    allowed: Tensor | None = None
    if right != NO_BOUND:
        allowed = distance >= -right
    if left != NO_BOUND:
        near = distance <= left
        allowed = near if allowed is None else allowed & near
    return None if allowed is None else allowed.unsqueeze(1)


def document_numbers(bounds: Tensor, t: int) -> Tensor:
    """(b, t) number of the document that each token of a row belongs to, from 1.

    bounds: (b, w) places where documents begin; entries of t or more say nothing."""
    begun = torch.zeros(bounds.shape[0], t + 1, dtype=torch.int32, device=bounds.device)
    begun.scatter_(1, bounds.long().clamp(max=t), 1)
    return begun[:, :-1].cumsum(dim=1)


def causal_mask(positions: Tensor, num_seen: int) -> Tensor:
    """(b, 1, s, t) True where key j <= the position of the query. positions: (b, s)."""
    keys = torch.arange(num_seen, device=positions.device)
    return (keys <= positions.unsqueeze(-1)).unsqueeze(1)


def trim_bounds(bounds: Tensor, multiple: int = 16) -> Tensor:
    """`bounds` (b, s + 1) without the columns that are unused in every row, except one.

    Kernels start blocks for every entry, so s + 1 of them are slow. Reads the values, so the batch
    must be on the CPU. The width is rounded up to a multiple, so that shapes seldom change."""
    assert bounds.device.type == "cpu", "trim before the batch goes to the device"
    s = bounds.shape[1] - 1
    used = int((bounds < s).sum(dim=1).max()) + 1
    width = min(-(-used // multiple) * multiple, s + 1)
    return bounds[:, :width].contiguous()


def packed_lengths(mask: AttentionMask, s: int, t: int) -> tuple[Tensor, Tensor]:
    """`cu_seqlens` of queries and of keys with all rows concatenated, int32.

    The queries are the last s of t keys of each row, or have `query_bounds`; a document without
    queries has length 0 there.
    Returns two of (b (w - 1) + 1)."""
    assert mask.bounds is not None
    bounds = mask.bounds.clamp(max=t)
    begins = bounds[:, :-1]
    rows = torch.arange(bounds.shape[0], device=bounds.device, dtype=bounds.dtype).unsqueeze(1)
    of_keys = (begins + rows * t).flatten()
    if mask.query_bounds is None:
        first_queries = (begins - (t - s)).clamp(min=0)
    else:
        first_queries = mask.query_bounds[:, :-1].clamp(max=s)
    of_queries = (first_queries + rows * s).flatten()
    ends = of_keys.new_full((1,), bounds.shape[0])
    return (
        torch.cat((of_queries, ends * s)).to(torch.int32),
        torch.cat((of_keys, ends * t)).to(torch.int32),
    )
