"""The layout of parameters in flat memory, and their buckets. Pure arithmetic.

The layout is Megatron-LM's: from the last registered parameter to the first, which is the order in
which backward finishes them; each begins at a multiple of 64 numbers; with the distributed
optimizer each bucket is padded so that its ranks' pieces are equal."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

ALIGNMENT = 64
"""Numbers that each parameter begins at a multiple of: 256 bytes of fp32, for vector units and
NCCL."""

SHARD_ALIGNMENT = 128
"""A bucket cut over ranks is a multiple of this and of their number, so that pieces are aligned."""

HIGH_BUS_ALIGNMENT = 2**16
"""... and of this under --ddp-pad-buckets-for-high-nccl-busbw: message sizes that NCCL likes."""


@dataclass(frozen=True, slots=True)
class ParamSlot:
    """Place of one parameter in its bucket."""

    index: int
    """Which parameter, in registration order."""
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """Parameters that one collective serves."""

    size: int
    """Numbers, padding included."""
    slots: tuple[ParamSlot, ...]


def plan_buckets(
    sizes: Sequence[int],
    *,
    bucket_size: int | None = None,
    multiple: int = ALIGNMENT,
    alone: Collection[int] = (),
) -> list[BucketPlan]:
    """Buckets for parameters of these sizes, given in registration order.

    A bucket is full once it holds `bucket_size` numbers (None: never); those in `alone` have one
    each; the size of each is a multiple of `multiple`."""
    members: list[list[int]] = []
    filled = 0
    for index in reversed(range(len(sizes))):
        is_full = bucket_size is not None and filled >= bucket_size
        after_alone = bool(members) and members[-1][0] in alone
        if not members or is_full or after_alone or index in alone:
            members.append([])
            filled = 0
        members[-1].append(index)
        filled += round_up(sizes[index], ALIGNMENT)
    return [_lay_out(held, sizes, multiple) for held in members]


def _lay_out(held: Sequence[int], sizes: Sequence[int], multiple: int) -> BucketPlan:
    slots = []
    start = 0
    for index in held:
        slots.append(ParamSlot(index, start, start + sizes[index]))
        start = round_up(start + sizes[index], ALIGNMENT)
    return BucketPlan(round_up(start, multiple), tuple(slots))


def shard_multiple(num_shards: int, *, high_bus: bool = False) -> int:
    """What the size of a bucket must divide by when this many ranks own a piece of it each."""
    multiple = math.lcm(num_shards, SHARD_ALIGNMENT)
    return math.lcm(multiple, HIGH_BUS_ALIGNMENT) if high_bus else multiple


def round_up(number: int, multiple: int) -> int:
    """The least multiple that is not below the number."""
    return -(-number // multiple) * multiple
