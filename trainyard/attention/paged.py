"""Attention of the new tokens of many sequences to keys and values in blocks.

The new tokens of all sequences stand behind one another in one row, and each sequence has a table
of the blocks that hold its keys. Here in torch, which copies the blocks of sequences together
first; `kernels.paged` and the flash-attn package (`paged_flash`) read them in place. One opaque
operator for `torch.compile`, a plain function otherwise.

T new tokens of all sequences, R sequences, n query heads, g key and value heads, d head channels,
d_v channels of a value, N blocks, B tokens of a block, M blocks of the longest sequence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainyard.attention.base import Softmax
from trainyard.attention.kept import as_bytes
from trainyard.attention.masks import NO_BOUND, AttentionMask, rule_matrix
from trainyard.attention.one_query import one_query_attention
from trainyard.attention.paged_flash import flash_over_blocks
from trainyard.attention.sdpa import SdpaBackend
from trainyard.kernels.available import TRITON

KERNEL_HEAD_DIM = 256
"""Most channels of a head that the kernel takes; a latent has more."""


class PagedLayout(NamedTuple):
    """Where the new tokens of a step belong."""

    positions: Tensor
    """(1, T) int64, of each token in its sequence."""
    blocks: Tensor
    """(T) int64, the block that its key and value go to."""
    places: Tensor
    """(T) int64, their place in it."""
    tables: Tensor
    """(R, M) int64, the blocks of each sequence in order; behind its last one anything."""
    starts: Tensor
    """(R + 1) int64, where the tokens of each sequence begin."""
    lengths: Tensor
    """(R) int64, keys of each sequence with the new ones."""
    most_new: int
    """New tokens of a sequence, at most."""
    most_keys: int
    """Tokens of a sequence, at most."""


def paged_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    layout: PagedLayout,
    softmax: Softmax,
    window: tuple[int, int] | None,
    flash_version: int = 0,
) -> Tensor:
    """Causal attention of each new token to its sequence, whose keys are stored already.

    q: (T, n, d); keys: (N, B, g, d); values: (N, B, g, d_v), of q's type or E4M3, query head i
    reading group i g / n. window: see `AttentionMask`. flash_version: generation of flash-attn that
    attends; 0: the kernel here, where it fits, or torch. Returns (T, n, d_v)."""
    assert not softmax.dropout_p, "a cache is not for training"
    assert softmax.bias is None, "no model with relative positions has a paged cache"
    out: Tensor = _operator()(
        *(q, keys, values, softmax.sink, layout.tables, layout.starts, layout.lengths),
        *(layout.most_new, layout.most_keys, softmax.scale),
        *(NO_BOUND if window is None else window[0], flash_version),
    )
    return out


def attends_in_rows(q: Tensor, v: Tensor) -> bool:
    """Whether `row_attention` reads keys in place: by the kernel alone."""
    return TRITON and q.is_cuda and _fits_kernel(q[:, :, 0], v)


def row_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    softmax: Softmax,
    window: tuple[int, int] | None,
) -> Tensor:
    """Attention of one query in each row to the first `lengths`, (b), of its keys: a block each.

    q: (b, n, 1, d); k: (b, g, t, d); v: (b, g, t, d_v). Returns (b, n, 1, d_v)."""
    rows, most = k.shape[0], k.shape[2]
    places = torch.arange(rows + 1, device=q.device)
    out: Tensor = _operator()(
        *(q[:, :, 0], k.transpose(1, 2), v.transpose(1, 2), softmax.sink),
        *(places[:-1].unsqueeze(1), places, lengths, 1, most, softmax.scale),
        *(NO_BOUND if window is None else window[0], 0),
    )
    return out.unsqueeze(2)


def _paged(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    sink: Tensor | None,
    tables: Tensor,
    starts: Tensor,
    lengths: Tensor,
    *constants: Any,
) -> Tensor:
    most_new, most_keys, scale, left, flash_version = constants
    sizes = {"most_new": most_new, "most_keys": most_keys, "scale": scale, "sink": sink}
    if flash_version:
        sequences = (tables, starts, lengths)
        return flash_over_blocks(flash_version, q, keys, values, sequences, left=left, **sizes)
    if not (TRITON and q.is_cuda) or not _fits_kernel(q, values):
        return gathered_attention(
            q, keys, values, (tables, starts, lengths), Softmax(scale, sink=sink), left
        )
    from trainyard.kernels.paged import paged_kernel

    out: Tensor = paged_kernel(q, keys, values, tables, starts, lengths, window=left, **sizes)
    return out


def _fits_kernel(q: Tensor, values: Tensor) -> bool:
    """Whether the kernel takes heads of these widths. With channels of 16 bits that it has to pad
    it gave wrong sums (40 and 24 channels, Triton 3.6 on an H200)."""
    widths = (q.shape[2], values.shape[3])
    padded = any(width & (width - 1) for width in widths)
    is_narrow = min(q.dtype.itemsize, values.dtype.itemsize) < 4
    return max(widths) <= KERNEL_HEAD_DIM and not (padded and is_narrow)


_definition = torch.library.custom_op(
    "trainyard::paged_attention",
    _paged,
    mutates_args=(),
    schema="(Tensor q, Tensor keys, Tensor values, Tensor? sink, Tensor tables, Tensor starts, "
    "Tensor lengths, int most_new, int most_keys, float scale, int left, int flash_version) "
    "-> Tensor",
)


@_definition.register_fake
def _(q: Tensor, keys: Tensor, values: Tensor, *rest: Any) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[1], values.shape[3])


# Typed by hand: torch.ops is filled as operators are registered.
_PAGED: Any = torch.ops.trainyard.paged_attention


def _operator() -> Callable[..., Tensor]:
    """The first call of an operator imports the compiler, which takes a second or more, and each
    call costs more than a function's."""
    return _PAGED if torch.compiler.is_compiling() else _paged


def gathered_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    sequences: tuple[Tensor, Tensor, Tensor],
    softmax: Softmax,
    left: int,
) -> Tensor:
    """`paged_attention` over copies of the blocks: sequences with equally many new tokens are one
    batch, whose keys are padded to the longest.

    sequences: tables, starts and lengths of a `PagedLayout`. left: keys of the window, or
    `NO_BOUND`."""
    tables, starts, lengths = sequences
    out = q.new_empty(*q.shape[:2], values.shape[3])
    counts = starts.diff()
    for count in counts.unique().tolist():
        own = (counts == count).nonzero()[:, 0]
        most = int(lengths[own].max())
        # The tokens of each sequence alone, not whole blocks: one may be longer than a text.
        # What is behind a sequence in its last block may be of a text whose values are NaN, and a
        # weight of 0 does not take that away: there it has its first token again.
        at = torch.arange(most, device=q.device)
        at = torch.where(at < lengths[own].unsqueeze(1), at, 0)  # (r, t)
        size = keys.shape[1]
        where = tables[own].gather(1, at // size), at % size
        k, v = (
            _gathered(x, where, q.dtype).transpose(1, 2) for x in (keys, values)
        )  # (r, g, t, d)
        new = torch.arange(count, device=q.device)
        rows = starts[own].unsqueeze(1) + new
        mask = AttentionMask(
            window=None if left == NO_BOUND else (left, 0),
            positions=(lengths[own] - count).unsqueeze(1) + new,
        )
        queries = q[rows].transpose(1, 2)  # (r, n, s, d)
        out[rows] = _attend(queries, k, v, mask, softmax).transpose(1, 2)
    return out


def _gathered(kept: Tensor, where: tuple[Tensor, Tensor], dtype: torch.dtype) -> Tensor:
    """(r, t, g, d) the vectors at these blocks and places in them."""
    return as_bytes(kept)[where].view(kept.dtype).to(dtype)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, softmax: Softmax) -> Tensor:
    """Later keys and the padding are behind the positions of the queries, and so masked."""
    if q.shape[2] == 1 and softmax.sink is None:
        assert mask.positions is not None
        keys = torch.arange(k.shape[2], device=q.device)
        return one_query_attention(q, k, v, rule_matrix(mask, mask.positions, keys), softmax.scale)
    backend = SdpaBackend("math" if q.is_cuda else "cpu")
    return backend.attend(q, k, v, mask, softmax)
