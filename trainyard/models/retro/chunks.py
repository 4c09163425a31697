"""Neighbours of the chunks of a sample, and chunks as rows of a batch.

The neighbours of chunk u are for the last token of u and for all but the last of chunk u + 1: they
may depend on all of u (arXiv:2112.04426, section 2.4). The first m - 1 tokens have no neighbours.

s sequence, b batch, l chunks with neighbours, m tokens of a chunk, k neighbours of a chunk,
r tokens of a neighbour, h hidden, c any dims of a token."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from trainyard.attention.masks import AttentionMask


class Neighbors(NamedTuple):
    """Neighbours of the first l chunks of a text."""

    tokens: Tensor
    """(b, l, k, r) int64; any padding behind the tokens of a neighbour."""
    lengths: Tensor
    """(b, l, k) tokens of each neighbour; 0: there is none."""


def chunked(x: Tensor, num_chunks: int) -> Tensor:
    """(l m, b, c) as rows for each chunk, (m, b l, c)."""
    by_chunk = x.unflatten(0, (num_chunks, -1)).transpose(0, 1).transpose(1, 2)  # (m, b, l, c)
    rows: Tensor = by_chunk.flatten(1, 2)
    return rows


def shifted_chunks(x: Tensor, num_chunks: int, length: int) -> Tensor:
    """The tokens that see the neighbours of each chunk, (m, b l, c); zeros behind the last token.
    x: (s, b, c) with s of l m or more."""
    shifted = x[length - 1 : length - 1 + num_chunks * length]
    missing = num_chunks * length - shifted.shape[0]
    padding = [0] * (2 * (x.ndim - 1)) + [0, missing]
    return chunked(functional.pad(shifted, padding), num_chunks)


def unshifted(rows: Tensor, batch: int, length: int, seq_length: int) -> Tensor:
    """The inverse of `shifted_chunks`: (m, b l, c) to (s, b, c), zeros where no neighbours are."""
    by_chunk = rows.unflatten(1, (batch, -1)).transpose(1, 2).transpose(0, 1)  # (l, m, b, c)
    flat = by_chunk.flatten(0, 1)[: seq_length - length + 1]
    behind = seq_length - length + 1 - flat.shape[0]
    padding = [0] * (2 * (rows.ndim - 1)) + [length - 1, behind]
    return functional.pad(flat, padding)


def of_rows(x: Tensor, num_neighbors: int) -> Tensor:
    """(r, b l k, c), a row for each neighbour, as (k r, b l, c), those of a chunk together."""
    by_chunk: Tensor = x.unflatten(1, (-1, num_neighbors)).movedim(2, 0)  # (k, r, b l, c)
    return by_chunk.flatten(0, 1)


def to_rows(x: Tensor, num_neighbors: int) -> Tensor:
    """The inverse of `of_rows`."""
    rows: Tensor = x.unflatten(0, (num_neighbors, -1)).movedim(0, 2).flatten(1, 2)
    return rows


def behind_sample(rows: Tensor, batch: int) -> Tensor:
    """(r, b l k, h) as (r l k, b, h), to follow the hidden states of a sample."""
    behind: Tensor = rows.unflatten(1, (batch, -1)).transpose(1, 2).flatten(0, 1)
    return behind


def from_behind_sample(x: Tensor, length: int) -> Tensor:
    """The inverse of `behind_sample`. length: r, or the part of it on this rank."""
    rows: Tensor = x.unflatten(0, (length, -1)).transpose(1, 2).flatten(1, 2)
    return rows


# --- masks ------------------------------------------------------------------------------------


def own_tokens(lengths: Tensor, size: int) -> AttentionMask:
    """Every neighbour sees its own tokens, padding only padding. lengths: (b, l, k); size: r."""
    counts = lengths.flatten().to(torch.int32)
    bounds = torch.stack((torch.zeros_like(counts), counts, torch.full_like(counts, size)), dim=1)
    return AttentionMask(causal=False, bounds=bounds)


def retrieved_tokens(lengths: Tensor, size: int) -> AttentionMask:
    """Every query of a chunk sees the tokens of its neighbours, and no padding. Where there are no
    neighbours it sees all, as a softmax over nothing is NaN; `has_neighbors` says where.

    lengths: (b, l, k); size: r. A mask of (b l, 1, 1, k r)."""
    # A row for all queries. Keys without their padding, for kernels that take lengths, were slower.
    places = torch.arange(size, device=lengths.device)
    allowed = (places < lengths.unsqueeze(-1)).flatten(0, 1).flatten(1)  # (b l, k r)
    allowed = allowed | ~allowed.any(dim=1, keepdim=True)
    return AttentionMask(causal=False, dense=allowed[:, None, None])


def has_neighbors(lengths: Tensor, length: int, seq_length: int) -> Tensor:
    """(s, b, 1) whether a token sees any neighbour. lengths: (b, l, k); length: m."""
    by_chunk = lengths.amax(dim=2).gt(0)  # (b, l)
    rows = by_chunk.flatten().expand(length, -1)
    return unshifted(rows, lengths.shape[0], length, seq_length).unsqueeze(-1)
