"""The ranks over which data parallelism shards, and those that hold copies of its shards.

With --num-distributed-optimizer-instances n, data-parallel ranks are n groups of neighbours. Each
group shards the whole; the ranks at the same place of all groups hold the same shard."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch.distributed import ProcessGroup

from trainyard.parallel.model import group_rank, group_size

Ranks = list[int]


@dataclass(frozen=True, slots=True)
class ShardGroups:
    """Groups of a rank; None for one rank alone."""

    everyone: ProcessGroup | None = None
    """Ranks over which gradients are summed."""
    shard: ProcessGroup | None = None
    """The ranks that share one copy of the state."""
    copies: ProcessGroup | None = None
    """The ranks that hold the same shard; None with one instance."""
    instances: tuple[tuple[int, ...], ...] = ()
    """The ranks of `everyone`, those of each instance."""

    @property
    def num_shards(self) -> int:
        """Ranks of an instance."""
        return group_size(self.shard)

    @property
    def shard_rank(self) -> int:
        """This rank's place in its instance."""
        return group_rank(self.shard)


UNSHARDED = ShardGroups()
"""One rank alone."""


def instances_of(ranks: Sequence[int], num_instances: int) -> list[Ranks]:
    """Neighbours of a data-parallel group, as many groups of them as there are instances."""
    size = len(ranks) // num_instances
    assert size * num_instances == len(ranks), (ranks, num_instances)
    return [list(ranks[start : start + size]) for start in range(0, len(ranks), size)]


def shards_of(groups: Sequence[Sequence[int]], num_instances: int) -> list[Ranks]:
    """The ranks of each instance of each data-parallel group."""
    return [ranks for group in groups for ranks in instances_of(group, num_instances)]


def copies_of(groups: Sequence[Sequence[int]], num_instances: int) -> list[Ranks]:
    """The ranks that hold the same shard, of each data-parallel group."""
    return [
        list(place)
        for group in groups
        for place in zip(*instances_of(group, num_instances), strict=True)
    ]
