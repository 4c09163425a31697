"""Flat ranges as boxes: laws."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from trainyard.optim.state import boxes_of_range, state_boxes
from trainyard.parallel.sharding import Shard, even_shard

shapes = st.lists(st.integers(1, 5), min_size=0, max_size=4).map(tuple)


@st.composite
def ranges(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[int, int]:
    size = math.prod(shape)
    first, second = draw(st.integers(0, size)), draw(st.integers(0, size))
    return min(first, second), max(first, second)


@given(st.data(), shapes)
def test_boxes_are_the_range_in_its_order_and_few(
    st_data: st.DataObject, shape: tuple[int, ...]
) -> None:
    start, stop = st_data.draw(ranges(shape))
    numbers = torch.arange(math.prod(shape)).view(shape)
    boxes = list(boxes_of_range(shape, start, stop))
    found: list[int] = []
    for box in boxes:
        index = tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))
        assert numbers[index].numel() == box.size
        found += numbers[index].flatten().tolist()
    assert found == list(range(start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


@st.composite
def sharded(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Shard | None]]:
    """A whole shape, and the parts of it that ranks hold."""
    shape = list(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    if draw(st.booleans()):
        return tuple(shape), [None]
    dim, size = draw(st.integers(0, len(shape) - 1)), draw(st.sampled_from([1, 2, 3]))
    parts = draw(st.sampled_from([1, 2]))
    shape[dim] *= size * parts
    whole = tuple(shape)
    return whole, [even_shard(whole, dim, size, rank, parts) for rank in range(size)]


@given(st.data(), sharded())
def test_pieces_of_all_ranks_make_up_the_whole_once(
    st_data: st.DataObject, case: tuple[tuple[int, ...], list[Shard | None]]
) -> None:
    """Tensor-parallel parts, each cut flat over data-parallel ranks, read and written as boxes."""
    shape, shards = case
    whole = torch.arange(math.prod(shape), dtype=torch.float32).view(shape)
    seen = torch.zeros(shape)
    for shard in shards:
        local = whole if shard is None else shard.take(whole)
        cut = sorted(st_data.draw(st.lists(st.integers(0, local.numel()), max_size=3)))
        for start, stop in zip([0, *cut], [*cut, local.numel()], strict=True):
            flat = local.reshape(-1)[start:stop].clone()
            boxes = list(state_boxes("m", flat, start, tuple(local.shape), shard))
            for box in boxes:
                sides = zip(box.offset, box.tensor.shape, strict=True)
                index = tuple(slice(o, o + n) for o, n in sides)
                assert box.global_shape == shape
                assert torch.equal(whole[index], box.tensor)
                seen[index] += 1
                box.tensor.neg_()  # what is written there is written in the flat memory
            assert torch.equal(flat, -local.reshape(-1)[start:stop])
    assert bool((seen == 1).all())
