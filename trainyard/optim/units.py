"""What a rank updates, in units: whole parameters, pieces of buckets, state in host memory."""

from __future__ import annotations

from collections.abc import Iterable

from torch.distributed import ProcessGroup

from trainyard.optim.host_piece import HostPiece
from trainyard.optim.owned_params import BucketPiece, OwnRows, TraitsOf, UpdateUnit, WholeParameters
from trainyard.parallel.data.buckets import ALIGNMENT
from trainyard.parallel.data.buffers import Bucket
from trainyard.parallel.data.chunk import Chunk
from trainyard.parallel.data.fully_sharded import FullyShardedPart


def build_units(
    chunks: Iterable[Chunk], traits_of: TraitsOf, offloaded: float = 0.0
) -> list[UpdateUnit]:
    """Everything that this rank updates. offloaded: the share of it whose state is on the host,
    for chunks with buckets."""
    units: list[UpdateUnit] = []
    for chunk in chunks:
        if isinstance(chunk, FullyShardedPart):
            units.append(OwnRows(chunk, traits_of))
            continue
        group = chunk.shard_group
        for bucket in chunk.buckets:
            units += _units_of(bucket, traits_of, group, offloaded, of_experts=chunk.of_experts)
        if chunk.members and not chunk.buckets:
            units.append(WholeParameters(chunk, traits_of))
    return units


def _units_of(
    bucket: Bucket,
    traits_of: TraitsOf,
    group: ProcessGroup | None,
    fraction: float,
    *,
    of_experts: bool,
) -> list[UpdateUnit]:
    """This rank's piece of a bucket: the first `fraction` of it on the host, the rest beside the
    model."""
    size = bucket.own_stop - bucket.own_start
    # Kernels round the last few numbers of a tensor otherwise: cut where parameters begin.
    there = min(size, round(size * fraction / ALIGNMENT) * ALIGNMENT)
    units: list[UpdateUnit] = []
    if there:
        part = (0, there)
        units.append(HostPiece(bucket, traits_of, group, of_experts=of_experts, part=part))
    if there < size:
        rest = (there, size)
        units.append(BucketPiece(bucket, traits_of, group, of_experts=of_experts, part=rest))
    return units
