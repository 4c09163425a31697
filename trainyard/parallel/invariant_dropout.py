"""Dropout on the residual stream that does not depend on the parallel layout.

A hash decides whether a number is dropped: of the micro-batch's seed, the layer and use, the row of
the micro-batch, the position of the token in the whole sequence, and the channel. So a rank with a
part of the sequence drops what one process would, a recomputed layer drops the same again, and no
generator state needs saving. The hash is murmur3's (A. Appleby, public
domain) in 32-bit integers that wrap around, out of plain operations: the same bits on CPU and CUDA,
and one fused kernel under `torch.compile`.

Attention dropout is not of this kind: fused kernels draw it themselves, from torch's generator.

s tokens of this rank, b rows of the micro-batch, h channels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trainyard.parallel.model import ModelParallel

# Constants of murmur3, as signed 32-bit integers.
_C1, _C2 = 0xCC9E2D51 - 2**32, 0x1B873593
_M1, _M2 = 0x85EBCA6B - 2**32, 0xC2B2AE35 - 2**32
_STEP = 0xE6546B64 - 2**32
_CHANNEL = 0x9E3779B9 - 2**32
"""2^32 / golden ratio: spreads consecutive channels before they are mixed."""


@dataclass(frozen=True, slots=True)
class DropoutPlace:
    """Seed and positions that identify a forward pass."""

    seed: Tensor
    """() int64 on the model's device: of the run, the step and the micro-batch. A tensor, so that
    a compiled layer is not compiled again for every seed."""
    positions: Tensor
    """(s) integers: place of each token of this rank in the whole sequence."""


def of_sequence_part(positions: Tensor, parallel: ModelParallel) -> Tensor:
    """The part of (s) that this rank holds between matrices: one tensor-parallel rank's under
    sequence parallelism, else all."""
    if not parallel.sequence_parallel:
        return positions
    length = positions.shape[0] // parallel.tp_size
    return positions.narrow(0, parallel.tp_rank * length, length)


def cut_free_dropout(x: Tensor, p: float, place: DropoutPlace, number: int) -> Tensor:
    """x / (1 - p) where kept, 0 where dropped, each number with probability p. x: (s, b, h).

    number: distinguishes uses of one seed (after attention, after the MLP)."""
    if p == 0.0:
        return x
    keep = keep_mask(x.shape, p, place, number)
    return torch.where(keep, x * (1.0 / (1.0 - p)), 0.0)


def keep_mask(shape: torch.Size, p: float, place: DropoutPlace, number: int) -> Tensor:
    """(s, b, h) bool, False with probability p."""
    s, b, h = shape
    assert place.positions.shape == (s,), (tuple(place.positions.shape), tuple(shape))
    rows = torch.arange(b, dtype=torch.int32, device=place.positions.device)
    low = (place.seed & 0x7FFFFFFF).to(torch.int32)
    high = ((place.seed >> 31) & 0x7FFFFFFF).to(torch.int32)
    key = _absorb(_absorb(low, high), torch.full_like(high, number))
    key = _absorb(key, place.positions.to(torch.int32).unsqueeze(1))  # (s, 1)
    key = _finish(_absorb(key, rows))  # (s, b)
    channels = torch.arange(h, dtype=torch.int32, device=rows.device)
    drawn = _finish(key.unsqueeze(-1) ^ _finish(channels * _CHANNEL + _STEP))
    threshold = min(round(p * 2**32), 2**32 - 1) - 2**31  # drawn is uniform over all int32
    return drawn >= threshold


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical, not arithmetic: zeros come in from the left."""
    return (x >> bits) & ((1 << (32 - bits)) - 1)


def _absorb(state: Tensor, word: Tensor) -> Tensor:
    """One round of murmur3's body."""
    word = word * _C1
    word = (word << 15) | _shift_right(word, 17)
    state = state ^ (word * _C2)
    state = (state << 13) | _shift_right(state, 19)
    return state * 5 + _STEP


def _finish(x: Tensor) -> Tensor:
    """murmur3's finaliser: every bit of the argument changes about half of the result's."""
    x = (x ^ _shift_right(x, 16)) * _M1
    x = (x ^ _shift_right(x, 13)) * _M2
    return x ^ _shift_right(x, 16)
