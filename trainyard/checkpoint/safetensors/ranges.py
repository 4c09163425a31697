"""Plans reads for boxes of tensors in a file: few reads, and no byte twice. Pure.

A box is cut where it crosses a grid of blocks: whole rows of a tensor, at most one read long. So
interleaved boxes (columns of a row-major matrix for several ranks) come from one read of the rows
they share, and no boxes overlap in two reads. Neighbours are read together unless the gap between
them is too large."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Generic, TypeVar

from trainyard.checkpoint.safetensors.blocks import block_bytes
from trainyard.checkpoint.safetensors.header import ITEM_BYTES, Extent

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Want(Generic[T]):
    """A requested box of one tensor of a file, and its target."""

    extent: Extent
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    target: T


@dataclass(frozen=True, slots=True)
class BoxPart(Generic[T]):
    """A box within a requested box that one read contains completely."""

    want: Want[T]
    local: tuple[int, ...]
    """Its offset in the requested box."""
    shape: tuple[int, ...]
    begin: int
    """Byte of the file at which its first element starts."""
    end: int
    """Byte after its last element; elements of other boxes may be in between."""

    @property
    def strides(self) -> tuple[int, ...]:
        """Strides of its elements in the file."""
        return strides_of(self.want.extent.spec.shape)

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return ITEM_BYTES[self.want.extent.spec.dtype]

    @property
    def size_bytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * self.itemsize

    @property
    def is_one_run(self) -> bool:
        """Whether its elements are contiguous in the file."""
        return self.end - self.begin == self.size_bytes


@dataclass(frozen=True, slots=True)
class Read(Generic[T]):
    """Bytes that are read at once, and the parts in them."""

    begin: int
    end: int
    parts: tuple[BoxPart[T], ...]


def strides_of(shape: Sequence[int]) -> tuple[int, ...]:
    """Elements from one index to the next along each dim, in C order."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def plan_reads(wants: Iterable[Want[T]], read_bytes: int, gap_bytes: int) -> list[Read[T]]:
    """Reads of at most `read_bytes` that contain all boxes of one file, in file order.

    Reads unrequested bytes only in gaps of at most `gap_bytes`."""
    parts = [part for want in wants for part in cut(want, read_bytes, gap_bytes)]
    reads: list[Read[T]] = []
    for cluster in _clusters(parts):
        last = reads[-1] if reads else None
        joins = last is not None and (
            cluster.begin - last.end <= gap_bytes and cluster.end - last.begin <= read_bytes
        )
        if last is not None and joins:
            reads[-1] = Read(last.begin, cluster.end, last.parts + cluster.parts)
        else:
            reads.append(cluster)
    return reads


def _clusters(parts: list[BoxPart[T]]) -> Iterator[Read[T]]:
    """Overlapping parts together: they are in one block, so at most one read long."""
    cluster: list[BoxPart[T]] = []
    end = 0
    for part in sorted(parts, key=lambda part: (part.begin, part.end)):
        if cluster and part.begin >= end:
            yield Read(cluster[0].begin, end, tuple(cluster))
            cluster = []
        cluster.append(part)
        end = max(end, part.end)
    if cluster:
        yield Read(cluster[0].begin, end, tuple(cluster))


def cut(want: Want[T], read_bytes: int, gap_bytes: int) -> Iterator[BoxPart[T]]:
    """A box in parts, each within one block and without a hole larger than a gap."""
    spec = want.extent.spec
    itemsize, strides = ITEM_BYTES[spec.dtype], strides_of(spec.shape)
    if math.prod(want.shape) == 0:
        return
    for segments in product(
        *_segments(want, strides, read_bytes // itemsize, gap_bytes // itemsize)
    ):
        local = tuple(begin for begin, _ in segments)
        shape = tuple(length for _, length in segments)
        places = zip(want.offset, local, strides, strict=True)
        first = sum((o + b) * stride for o, b, stride in places)
        begin = want.extent.begin + first * itemsize
        yield BoxPart(want, local, shape, begin, begin + _span(shape, strides) * itemsize)


def _span(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Elements from the first of a box to after its last."""
    return 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))


def _segments(
    want: Want[T], strides: Sequence[int], most: int, gap: int
) -> list[list[tuple[int, int]]]:
    """For each dim, the (begin, length) into which a box is cut along it. Counts in elements."""
    shape = want.shape
    # Digests are of blocks: a reader of a part of one reads all of it.
    block = block_bytes(want.extent.spec) // ITEM_BYTES[want.extent.spec.dtype]
    # Blocks are cut along the first dim of which one index fits into a read.
    grid = next((dim for dim, stride in enumerate(strides) if stride <= most), 0)
    holes = [
        dim
        for dim, n in enumerate(shape)
        if n > 1 and strides[dim] - _span(shape[dim + 1 :], strides[dim + 1 :]) > gap
    ]
    # Dims before `first_whole` are cut at every index.
    first_whole = max([grid, *(dim + 1 for dim in holes)])
    cuts = []
    for dim, n in enumerate(shape):
        if dim < first_whole:
            cuts.append([(index, 1) for index in range(n)])
        elif dim == grid:
            rows, of_block = max(1, most // strides[dim]), max(1, block // strides[dim])
            if rows > of_block:
                rows -= rows % of_block
            cuts.append(_on_grid(want.offset[dim], n, rows))
        else:
            cuts.append([(0, n)])
    return cuts


def _on_grid(offset: int, length: int, step: int) -> list[tuple[int, int]]:
    """A range in parts that end at multiples of `step`, relative to its start."""
    first = offset - offset % step
    bounds = [max(at, offset) for at in range(first, offset + length, step)]
    ends = [*bounds[1:], offset + length]
    return [(begin - offset, end - begin) for begin, end in zip(bounds, ends, strict=True)]
