"""Where documents begin within samples: positions, bounds, and the mask that follows from them.

Bounds are the input of attention kernels for packed sequences: `cu_seqlens`, the place in the
sample at which each document begins, ascending from 0, and s in every entry after the last. They
are (s + 1,) for any number of documents, so that samples stack. Pure functions of arrays.

b samples, s tokens each. A document that is cut by the end of a sample continues as a separate one
in the next."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Segments:
    """Runs of tokens of one document each, in b samples; none spans two samples."""

    shape: tuple[int, int]
    """(b, s)"""
    sample: NDArray[np.int64]
    """(n,) the sample of each segment."""
    begin: NDArray[np.int64]
    """(n,) where each segment begins in its sample."""
    length: NDArray[np.int64]
    """(n,) tokens of each segment, at least 1."""

    @staticmethod
    def of(begins: NDArray[np.int64], shape: tuple[int, int]) -> Segments:
        """begins: (n,) ascending places in the b * s tokens, including every multiple of s."""
        length = np.empty_like(begins)
        np.subtract(begins[1:], begins[:-1], out=length[:-1])
        length[-1] = shape[0] * shape[1] - begins[-1]
        if shape[0] == 1:
            return Segments(shape, np.zeros_like(begins), begins, length)
        sample = begins // shape[1]
        return Segments(shape, sample, begins - sample * shape[1], length)


def segments_after_ends(ends: NDArray[np.bool_]) -> Segments:
    """Segments from ends of document. ends: (b, s) True at each; it belongs to the document that
    it ends."""
    b, s = ends.shape
    starts = np.empty(b * s + 1, np.bool_)
    starts[1:] = ends.reshape(-1)
    starts[:-1:s] = True
    return Segments.of(starts[:-1].nonzero()[0], (b, s))


def positions(segments: Segments) -> NDArray[np.int64]:
    """(b, s) the place of each token in its segment."""
    places = segments.begin.repeat(segments.length).reshape(segments.shape)
    return np.subtract(_arange(segments.shape[1]), places, out=places)


def cu_seqlens(segments: Segments) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """(b, s + 1) bounds of the segments of each sample, and (b,) the longest of each."""
    b, s = segments.shape
    bounds = np.empty((b, s + 1), np.int32)
    bounds.fill(s)
    if b == 1:
        bounds[0, : len(segments.begin)] = segments.begin
        return bounds, segments.length.max(keepdims=True).astype(np.int32)
    firsts = segments.sample.searchsorted(_arange(b))
    bounds[segments.sample, np.arange(len(segments.sample)) - firsts[segments.sample]] = (
        segments.begin
    )
    return bounds, np.maximum.reduceat(segments.length, firsts).astype(np.int32)


@cache
def _arange(n: int) -> NDArray[np.int64]:
    numbers = np.arange(n, dtype=np.int64)
    numbers.flags.writeable = False
    return numbers


def attention_mask(bounds: NDArray[Any] | None, seq_length: int) -> NDArray[np.bool_]:
    """(..., 1, s, s) causal mask, True where a token must not attend. With (..., s + 1) bounds, no
    token attends to another document either.

    It takes s * s bytes a sample, so samples normally have only bounds."""
    place = np.arange(seq_length)
    later = place > place[:, None]
    if bounds is None:
        return later[None]
    document = document_numbers(bounds)
    other = document[..., None, :] != document[..., :, None]
    return np.expand_dims(later | other, -3)


def document_numbers(bounds: NDArray[Any]) -> NDArray[np.int64]:
    """(..., s) which document of its sample each token belongs to, from (..., s + 1) bounds."""
    begun = np.zeros(bounds.shape, np.int8)
    np.put_along_axis(begun, bounds.astype(np.int64), 1, axis=-1)
    return np.cumsum(begun[..., :-1], axis=-1, dtype=np.int64) - 1
