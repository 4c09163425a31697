"""Every element of every box is brought once, in reads that never overlap, whatever the boxes."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from trainyard.checkpoint.safetensors.header import ITEM_BYTES, Extent, TensorSpec
from trainyard.checkpoint.safetensors.ranges import Read, Want, cut, plan_reads

GAPS = st.sampled_from([0, 8, 40])
SIZES = st.sampled_from([8, 24, 100, 10_000])


@st.composite
def boxes(draw: st.DrawFn) -> list[Want[int]]:
    """Boxes, overlapping or not, of tensors that lie one after another in a file."""
    wants: list[Want[int]] = []
    begin = 16
    for _ in range(draw(st.integers(1, 3))):
        shape = tuple(draw(st.lists(st.integers(1, 6), max_size=3)))
        extent = Extent(TensorSpec(draw(st.sampled_from(["F32", "BF16"])), shape), begin)
        begin += extent.spec.size_bytes
        for _ in range(draw(st.integers(0, 3))):
            offset = tuple(draw(st.integers(0, size - 1)) for size in shape)
            lengths = zip(offset, shape, strict=True)
            length = tuple(draw(st.integers(0, size - o)) for o, size in lengths)
            wants.append(Want(extent, offset, length, len(wants)))
    return wants


def bytes_of(want: Want[int], offset: tuple[int, ...], shape: tuple[int, ...]) -> set[int]:
    """The bytes of the file that a box within a wanted one takes."""
    spec = want.extent.spec
    numbers = torch.arange(math.prod(spec.shape)).view(spec.shape)
    for dim, (at, begin, length) in enumerate(zip(want.offset, offset, shape, strict=True)):
        numbers = numbers.narrow(dim, at + begin, length)
    size = ITEM_BYTES[spec.dtype]
    firsts = (want.extent.begin + size * int(n) for n in numbers.reshape(-1))
    return {first + k for first in firsts for k in range(size)}


def brought(reads: list[Read[int]], number: int) -> list[int]:
    """The bytes that all parts of one want take together, with repetitions."""
    parts = [part for read in reads for part in read.parts if part.want.target == number]
    return [b for part in parts for b in bytes_of(part.want, part.local, part.shape)]


@given(boxes(), SIZES, GAPS)
def test_each_element_of_each_box_comes_once_in_reads_that_do_not_overlap(
    wants: list[Want[int]], read_bytes: int, gap_bytes: int
) -> None:
    reads = plan_reads(wants, read_bytes, gap_bytes)
    for want in wants:
        whole = bytes_of(want, (0,) * len(want.shape), want.shape)
        assert sorted(brought(reads, want.target)) == sorted(whole)
    ends = [16, *(read.end for read in reads)]
    assert all(end <= read.begin for end, read in zip(ends, reads, strict=False))
    assert all(read.end - read.begin <= read_bytes for read in reads)
    for read in reads:
        for part in read.parts:
            inside = bytes_of(part.want, part.local, part.shape)
            assert (min(inside), max(inside) + 1) == (part.begin, part.end)
            assert read.begin <= part.begin <= part.end <= read.end


@given(boxes(), SIZES, GAPS)
def test_only_gaps_that_are_small_are_read_for_nothing(
    wants: list[Want[int]], read_bytes: int, gap_bytes: int
) -> None:
    useful = {b for w in wants for b in bytes_of(w, (0,) * len(w.shape), w.shape)}
    for read in plan_reads(wants, read_bytes, gap_bytes):
        inside = sorted(useful & set(range(read.begin, read.end)))
        assert (inside[0], inside[-1] + 1) == (read.begin, read.end)
        steps = pairwise(inside)
        assert max((b - a - 1 for a, b in steps), default=0) <= gap_bytes


def test_columns_of_a_matrix_that_several_take_come_out_of_the_rows_they_share() -> None:
    matrix = Extent(TensorSpec("F32", (64, 32)), 8)
    columns = [Want(matrix, (0, 8 * rank), (64, 8), rank) for rank in range(4)]
    reads = plan_reads(columns, read_bytes=1024, gap_bytes=1024)
    assert sum(read.end - read.begin for read in reads) == matrix.spec.size_bytes
    assert len(reads) == 8
    alone = plan_reads(columns[:1], read_bytes=1024, gap_bytes=16)
    assert [read.end - read.begin for read in alone] == [32] * 64


def test_rows_larger_than_a_read_are_cut_within() -> None:
    experts = Extent(TensorSpec("BF16", (2, 100, 10)), 0)
    parts = list(cut(Want(experts, (0, 5, 0), (2, 90, 10), None), 400, 0))
    assert all(part.is_one_run and part.size_bytes <= 400 for part in parts)
    assert [part.local for part in parts][:3] == [(0, 0, 0), (0, 15, 0), (0, 35, 0)]
