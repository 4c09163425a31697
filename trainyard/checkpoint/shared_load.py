"""Loads a checkpoint on many ranks: one rank reads each byte and sends it to those that need it.

Ranks need the same weights (data parallelism), or interleaved columns of them (tensor parallelism),
which an object store returns only with all bytes in between. So the reads of the ranks of one
replica (one copy of the model) are planned together: each read goes to the least loaded rank that
needs some of it, which sends boxes of it to the others. Reading runs ahead of the exchange.

What all replicas need is divided among them: each reads a part, and sends it to the others. So a
rank plans for the ranks of its replica, whose number does not grow with that of replicas."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from trainyard.checkpoint.copies import (
    EXCHANGED_BYTES,
    Wanted,
    common_boxes,
    communicating,
    device_of,
    divide,
    send_boxes,
)
from trainyard.checkpoint.index import Located
from trainyard.checkpoint.safetensors.blocks import BLOCK_BYTES
from trainyard.checkpoint.safetensors.file import DTYPES, TensorFile, box_of, values_in
from trainyard.checkpoint.safetensors.ranges import BoxPart, Read, Want
from trainyard.checkpoint.safetensors.shard import in_threads, num_threads
from trainyard.checkpoint.stored_step import ShardFiles
from trainyard.parallel.groups import ProcessGroups, gather_or_raise

Locate: TypeAlias = Callable[[str, Sequence[int], Sequence[int]], list[Located]]

READS_PER_RANK = 8
"""Minimum, unless reads become too small: balances the bytes over ranks."""

MOST_READ_BYTES, LEAST_READ_BYTES = 4 * BLOCK_BYTES, BLOCK_BYTES
"""Whole blocks: a rank that reads a part of one reads all of it."""

ALIGNED_BYTES = 8
"""Boxes start at multiples of it in messages."""


@dataclass(frozen=True, slots=True)
class Goal:
    """The target of a box: a rank, the number of its box, and the offset in it."""

    rank: int
    box: int
    at: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ReadJob:
    """A read, and its parts for each rank."""

    file: TensorFile
    read: Read[Goal]
    parts: Mapping[int, Sequence[BoxPart[Goal]]]
    readers: Sequence[int] = ()
    """Ranks that can see the file; empty: all ranks."""

    @property
    def size_bytes(self) -> int:
        """Bytes of the read."""
        return self.read.end - self.read.begin

    @staticmethod
    def of(file: TensorFile, read: Read[Goal], readers: Sequence[int] = ()) -> ReadJob:
        """Sort the parts of a read by rank."""
        parts: dict[int, list[BoxPart[Goal]]] = defaultdict(list)
        for part in read.parts:
            parts[part.want.target.rank].append(part)
        return ReadJob(file, read, dict(parts), readers)


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
    load = _Load(files, locate)
    if files.readers or not groups.replicas:  # files that only some ranks see: perhaps elsewhere
        return load.plan_and_fill(wanted, groups.world)
    size, left = 0, list(wanted)
    for replicas in groups.replicas:
        common = common_boxes(left, replicas.copies)
        shared = [box for box, is_common in zip(left, common, strict=True) if is_common]
        left = [box for box, is_common in zip(left, common, strict=True) if not is_common]
        parts = divide(shared, dist.get_world_size(replicas.copies))
        own = parts[dist.get_rank(replicas.copies)]
        size += _on_all(load, own, replicas.within, groups.world)
        with communicating():
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
        queues = _assign(_plan(opened, located, world, files.readers), world)
        exchange = _Exchange([memory for _, _, memory in wanted], rank, group)
        gather_or_raise(lambda: exchange.run(queues), group)
        gather_or_raise(lambda: _check_unchanged(opened), group)
        return sum(job.size_bytes for job in queues[rank])


Request: TypeAlias = tuple[str, tuple[int, ...], tuple[int, ...]]
"""A tensor's name, the offset of a box of it, and its shape."""


def locate_all(requests: Sequence[Sequence[Request]], locate: Locate) -> list[tuple[Located, Goal]]:
    """The pieces of the boxes that each rank asks for. Boxes that several ask for are looked up
    once."""
    found: dict[Request, list[Located]] = {}
    located = []
    for rank, boxes in enumerate(requests):
        for number, box in enumerate(boxes):
            if box not in found:
                found[box] = locate(*box)
            located += [(part, Goal(rank, number, part.at)) for part in found[box]]
    return located


def _check_unchanged(opened: Mapping[str, TensorFile]) -> None:
    for file in opened.values():
        file.check_unchanged()


# --- the plan: equal on all ranks ---------------------------------------------------------------


def _plan(
    opened: dict[str, TensorFile],
    located: Sequence[tuple[Located, Goal]],
    world: int,
    readers: Mapping[str, Sequence[int]],
) -> list[ReadJob]:
    wants: dict[str, list[Want[Goal]]] = defaultdict(list)
    for part, goal in located:
        extent = opened[part.piece.file].extents[part.piece.key]
        wants[part.piece.file].append(Want(extent, part.offset, part.shape, goal))
    extents = {(w.extent.begin, name): w.extent for name in wants for w in wants[name]}
    size = sum(extent.spec.size_bytes for extent in extents.values())
    fitting = min(EXCHANGED_BYTES // world, size // (READS_PER_RANK * world))
    read_bytes = min(MOST_READ_BYTES, max(LEAST_READ_BYTES, fitting))
    return [
        ReadJob.of(opened[name], read, readers.get(name, ()))
        for name in sorted(wants)
        for read in opened[name].plan(wants[name], read_bytes)
    ]


def _assign(jobs: Sequence[ReadJob], world: int) -> list[list[ReadJob]]:
    """The reads of each rank: balanced bytes, and where possible of data that it needs itself."""
    loads = [0] * world
    queues: list[list[ReadJob]] = [[] for _ in range(world)]
    for job in jobs:
        able = job.parts if not job.readers else [r for r in job.readers if r in job.parts]
        rank = min(able or job.readers, key=lambda rank: (loads[rank], rank))
        loads[rank] += job.size_bytes
        queues[rank].append(job)
    return queues


# --- carrying it out ----------------------------------------------------------------------------


class _Exchange:
    """One rank's part: in each round all ranks read, then send the boxes of other ranks."""

    def __init__(
        self, memories: Sequence[torch.Tensor], rank: int, group: ProcessGroup | None
    ) -> None:
        self._memories, self._rank, self._group = memories, rank, group
        self._device = device_of(group) if group is not None else torch.device("cpu")

    def run(self, queues: Sequence[Sequence[ReadJob]]) -> None:
        """All rounds. Raises an error of this rank after the last one: other ranks wait for it."""
        failure: Exception | None = None
        mine = self._loaded(queues[self._rank])
        for jobs in zip_longest(*queues):
            own, data = jobs[self._rank], torch.empty(0, dtype=torch.uint8)
            if own is not None:
                try:
                    data = self._next(own, mine) if failure is None else _nothing_of(own)
                except Exception as error:
                    failure, data = error, _nothing_of(own)
            if any(job is not None and job.parts.keys() - {at} for at, job in enumerate(jobs)):
                self._send(data, jobs)
        if failure is not None:
            raise failure

    @staticmethod
    def _loaded(queue: Sequence[ReadJob]) -> Iterator[torch.Tensor]:
        threads = num_threads(job.file for job in queue)
        return in_threads(lambda job: job.file.load(job.read), queue, threads)

    def _next(self, job: ReadJob, mine: Iterator[torch.Tensor]) -> torch.Tensor:
        data = next(mine)
        for part in job.parts.get(self._rank, ()):
            self._fill(part, values_in(data, job.read, part))
        return data

    def _send(self, data: torch.Tensor, jobs: Sequence[ReadJob | None]) -> None:
        """data: read by this rank in this round."""
        own, here = jobs[self._rank], self._rank
        others = [rank if rank != here else None for rank in range(len(jobs))]
        outgoing = [_parts(own, rank) for rank in others]
        incoming = [_parts(jobs[rank], here) if rank is not None else () for rank in others]
        sent = torch.zeros(sum(map(_length, outgoing)), dtype=torch.uint8)
        for part, box in _boxes(sent, outgoing):
            assert own is not None
            box.copy_(values_in(data, own.read, part))
        received = torch.empty(sum(map(_length, incoming)), dtype=torch.uint8, device=self._device)
        with communicating():
            dist.all_to_all_single(
                received,
                sent.to(self._device),
                [_length(parts) for parts in incoming],
                [_length(parts) for parts in outgoing],
                group=self._group,
            )
        for part, box in _boxes(received, incoming):
            self._fill(part, box)

    def _fill(self, part: BoxPart[Goal], values: torch.Tensor) -> None:
        goal = part.want.target
        at = [a + b for a, b in zip(goal.at, part.local, strict=True)]
        box_of(self._memories[goal.box].detach(), at, part.shape).copy_(values)


def _nothing_of(job: ReadJob) -> torch.Tensor:
    """Zeros for a read that failed; all ranks raise the error at the end."""
    return torch.zeros(job.size_bytes, dtype=torch.uint8)


def _parts(job: ReadJob | None, rank: int | None) -> Sequence[BoxPart[Goal]]:
    return job.parts.get(rank, ()) if job is not None and rank is not None else ()


def _boxes(
    message: torch.Tensor, groups: Sequence[Sequence[BoxPart[Goal]]]
) -> Iterator[tuple[BoxPart[Goal], torch.Tensor]]:
    """Each part of a message, with its memory there."""
    begin = 0
    for part in (part for parts in groups for part in parts):
        flat = message[begin : begin + part.size_bytes]
        yield part, flat.view(DTYPES[part.want.extent.spec.dtype]).view(part.shape)
        begin += _padded(part)


def _padded(part: BoxPart[Goal]) -> int:
    return -(-part.size_bytes // ALIGNED_BYTES) * ALIGNED_BYTES


def _length(parts: Sequence[BoxPart[Goal]]) -> int:
    return sum(map(_padded, parts))
