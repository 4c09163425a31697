"""Loads a checkpoint on many ranks: one rank reads each byte and sends it to those that need it.

Ranks need the same weights (data parallelism), or interleaved columns of them (tensor parallelism),
which an object store returns only with all bytes in between. So the reads of the ranks of one
replica (one copy of the model) are planned together: each read goes to the least loaded rank that
needs some of it, which sends boxes of it to the others. Reading runs ahead of the exchange.

What all replicas need is divided among them: each reads a part, and sends it to the others. So a
rank plans for the ranks of its replica, whose number does not grow with that of replicas. A step
of which each rank sees some files alone is loaded by `scattered_load`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed import ProcessGroup

from trainyard.checkpoint.copies import Wanted, common_boxes, divide, send_boxes
from trainyard.checkpoint.exchange import Exchange, Incoming
from trainyard.checkpoint.read_jobs import (
    Delivery,
    Locate,
    ReadJob,
    Wants,
    assign_jobs,
    locate_all,
    num_sent,
    plan_jobs,
    read_bytes_for,
)
from trainyard.checkpoint.safetensors.file import TensorFile
from trainyard.checkpoint.safetensors.ranges import Want
from trainyard.checkpoint.scattered_load import fill_scattered
from trainyard.checkpoint.stored_step import ShardFiles
from trainyard.parallel.comm_errors import communicating
from trainyard.parallel.groups import ProcessGroups, gather_or_raise


@dataclass(frozen=True, slots=True)
class Replicas:
    """Two axes of the ranks: each pair of a group `within` and a group `copies` shares one rank."""

    within: ProcessGroup | None
    """Ranks that hold one copy of the tensors; None: this rank alone."""
    copies: ProcessGroup
    """Ranks that hold the same part of the tensors."""


@dataclass(frozen=True, slots=True)
class LoadGroups:
    """Ranks that load together."""

    world: ProcessGroup
    """All of them."""
    replicas: tuple[Replicas, ...] = ()
    """Ways to divide them into replicas, first that of most tensors. Empty: there is one replica.
    """

    @staticmethod
    def of(groups: ProcessGroups) -> LoadGroups | None:
        """The ranks of a run; None for one rank alone."""
        if groups.world is None:
            return None
        axes = [(groups.model, groups.dp_cp)]
        if groups.has_expert_grid:
            axes.append((groups.expert_model, groups.expert_dp))
        replicas = (Replicas(within, copies) for within, copies in axes if copies is not None)
        return LoadGroups(groups.world, tuple(replicas))


def fill_together(
    files: ShardFiles[TensorFile], locate: Locate, wanted: Sequence[Wanted], groups: LoadGroups
) -> int:
    """Fill memory on all ranks, which call this together; returns the bytes read here.

    An error of one rank is raised on all."""
    if files.sight is not None:
        copies = [replicas.copies for replicas in groups.replicas]
        return fill_scattered(files, files.sight, locate, wanted, groups.world, copies)
    load = _Load(files, locate)
    if not groups.replicas:
        return load.plan_and_fill(wanted, groups.world)
    size, left = 0, list(wanted)
    for replicas in groups.replicas:
        common = common_boxes(left, replicas.copies)
        shared = [box for box, is_common in zip(left, common, strict=True) if is_common]
        left = [box for box, is_common in zip(left, common, strict=True) if not is_common]
        parts = divide(shared, dist.get_world_size(replicas.copies))
        own = parts[dist.get_rank(replicas.copies)]
        size += _on_all(load, own, replicas.within, groups.world)
        with communicating("load: sending boxes to replicas"):
            for source, part in enumerate(parts):
                send_boxes([memory for _, _, memory in part], source, replicas.copies)
    return size + _on_all(load, left, groups.replicas[0].within, groups.world)


def _on_all(
    load: _Load, wanted: Sequence[Wanted], within: ProcessGroup | None, world: ProcessGroup
) -> int:
    """Fill memory in each replica; an error in one is raised in all, so that none waits for it."""
    sizes = gather_or_raise(lambda: load.plan_and_fill(wanted, within), world, give=False)
    return sizes[dist.get_rank(world)]


@dataclass(frozen=True, slots=True)
class _Load:
    """The files of a step."""

    files: ShardFiles[TensorFile]
    locate: Locate

    def plan_and_fill(self, wanted: Sequence[Wanted], group: ProcessGroup | None) -> int:
        """Fill memory on all ranks of a group by one plan; returns the bytes read here."""
        files = self.files
        rank, world = (dist.get_rank(group), dist.get_world_size(group)) if group else (0, 1)
        own = [(name, tuple(offset), tuple(memory.shape)) for name, offset, memory in wanted]
        requests = gather_or_raise(lambda: own, group)
        located = locate_all(requests, self.locate)
        names = sorted({part.piece.file for part, _ in located})
        opened = gather_or_raise(lambda: files.open_unchecked(names), group, give=False)[rank]
        # One rank checks each file, whether or not it has read some of it before.
        gather_or_raise(lambda: files.check(files.unchecked(names[rank::world])), group)
        files.mark_checked(names)
        wants: Wants = defaultdict(list)
        for part, goal in located:
            extent = opened[part.piece.file].extents[part.piece.key]
            wants[part.piece.file].append(Want(extent, part.offset, part.shape, goal))
        jobs = plan_jobs(opened, wants, read_bytes_for(wants, world, world))
        queues = assign_jobs(jobs, range(world))
        exchange = Exchange([memory for _, _, memory in wanted], rank, group)
        incoming = _incoming(queues, rank)
        gather_or_raise(lambda: exchange.run(queues[rank], incoming), group)
        gather_or_raise(lambda: _check_unchanged(opened), group)
        return sum(job.size_bytes for job in queues[rank])


def _incoming(queues: Mapping[int, Sequence[ReadJob]], rank: int) -> Incoming:
    """What a rank receives in each round, from the reads of all."""
    rounds = max(num_sent(jobs, reader) for reader, jobs in queues.items())
    return [
        {
            reader: [Delivery.of(part) for part in jobs[number].parts[rank]]
            for reader, jobs in queues.items()
            if reader != rank and number < len(jobs) and rank in jobs[number].parts
        }
        for number in range(rounds)
    ]


def _check_unchanged(opened: Mapping[str, TensorFile]) -> None:
    for file in opened.values():
        file.check_unchanged()
