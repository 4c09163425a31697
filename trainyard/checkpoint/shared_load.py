"""Ranks that load together: each byte that some of them need is read by one, and handed on.

Ranks need the same weights (data parallelism), or interleaved columns of them, which an object
store gives only with all that lies between (tensor parallelism). Here all wishes of all ranks are
planned as one: a read goes to one of the ranks that need some of it, the least loaded, and then the
boxes in it to the ranks that asked for them. Reading runs ahead while boxes are exchanged."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from trainyard.checkpoint.index import Located
from trainyard.checkpoint.safetensors.file import DTYPES, TensorFile, box_of, values_in
from trainyard.checkpoint.safetensors.ranges import Part, Read, Want
from trainyard.checkpoint.safetensors.shard import in_threads, num_threads
from trainyard.checkpoint.stored_step import ShardFiles
from trainyard.errors import CommunicationError, lack_of_memory
from trainyard.parallel.groups import gather_or_raise

Wanted: TypeAlias = tuple[str, Sequence[int], torch.Tensor]
"""A tensor's name, the offset of a box of it, and the memory that the box is to fill."""

Locate: TypeAlias = Callable[[str, Sequence[int], Sequence[int]], list[Located]]

EXCHANGED_BYTES = 64 << 20
"""What a rank sends in a round, and receives, at most; where ranks are so many that reads would
become small, more."""

READS_PER_RANK = 8
"""At least, where reads do not become too small: so that ranks read alike much."""

MOST_READ_BYTES, LEAST_READ_BYTES = 4 << 20, 512 << 10

ALIGNED_BYTES = 8
"""Boxes begin at multiples of it in messages."""


@dataclass(frozen=True, slots=True)
class Goal:
    """What a box is for: a rank, which of its boxes, and where in it."""

    rank: int
    box: int
    at: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Job:
    """A read, and what of it is for which rank."""

    file: TensorFile
    read: Read[Goal]
    parts: Mapping[int, Sequence[Part[Goal]]]
    readers: Sequence[int] = ()
    """Ranks that see the file; none: all do."""

    @property
    def size_bytes(self) -> int:
        """Of the read."""
        return self.read.end - self.read.begin

    @staticmethod
    def of(file: TensorFile, read: Read[Goal], readers: Sequence[int] = ()) -> Job:
        """Sort the parts of a read by rank."""
        parts: dict[int, list[Part[Goal]]] = defaultdict(list)
        for part in read.parts:
            parts[part.want.target.rank].append(part)
        return Job(file, read, dict(parts), readers)


def fill_together(
    files: ShardFiles[TensorFile], locate: Locate, wanted: Sequence[Wanted], group: ProcessGroup
) -> int:
    """Fill memory on all ranks of a group, which call this together; how many bytes this one read.

    What fails on one rank is raised on all."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    own = [(name, tuple(offset), tuple(memory.shape)) for name, offset, memory in wanted]
    wishes = gather_or_raise(lambda: own, group)
    places = [
        (place, Goal(of, box, place.at))
        for of, boxes in enumerate(wishes)
        for box, (name, offset, shape) in enumerate(boxes)
        for place in locate(name, offset, shape)
    ]
    names = sorted({place.piece.file for place, _ in places})
    opened = gather_or_raise(lambda: files.open_unchecked(names), group, give=False)[rank]
    # Each file is one rank's to check, whichever of them has read some of it before.
    gather_or_raise(lambda: files.check(files.unchecked(names[rank::world])), group)
    files.mark_checked(names)
    queues = _assign(_plan(opened, places, world, files.readers), world)
    exchange = _Exchange([memory for _, _, memory in wanted], rank, group)
    gather_or_raise(lambda: exchange.run(queues), group)
    gather_or_raise(lambda: _check_unchanged(opened), group)
    return sum(job.size_bytes for job in queues[rank])


def _check_unchanged(opened: Mapping[str, TensorFile]) -> None:
    for file in opened.values():
        file.check_unchanged()


# --- the plan: equal on all ranks ---------------------------------------------------------------


def _plan(
    opened: dict[str, TensorFile],
    places: Sequence[tuple[Located, Goal]],
    world: int,
    readers: Mapping[str, Sequence[int]],
) -> list[Job]:
    wants: dict[str, list[Want[Goal]]] = defaultdict(list)
    for place, goal in places:
        extent = opened[place.piece.file].extents[place.piece.key]
        wants[place.piece.file].append(Want(extent, place.offset, place.shape, goal))
    extents = {(w.extent.begin, name): w.extent for name in wants for w in wants[name]}
    size = sum(extent.spec.size_bytes for extent in extents.values())
    fitting = min(EXCHANGED_BYTES // world, size // (READS_PER_RANK * world))
    read_bytes = min(MOST_READ_BYTES, max(LEAST_READ_BYTES, fitting))
    return [
        Job.of(opened[name], read, readers.get(name, ()))
        for name in sorted(wants)
        for read in opened[name].plan(wants[name], read_bytes)
    ]


def _assign(jobs: Sequence[Job], world: int) -> list[list[Job]]:
    """What each rank reads: where it can be, something that it needs itself, the bytes balanced."""
    loads = [0] * world
    queues: list[list[Job]] = [[] for _ in range(world)]
    for job in jobs:
        able = job.parts if not job.readers else [r for r in job.readers if r in job.parts]
        rank = min(able or job.readers, key=lambda rank: (loads[rank], rank))
        loads[rank] += job.size_bytes
        queues[rank].append(job)
    return queues


# --- carrying it out ----------------------------------------------------------------------------


class _Exchange:
    """One rank's part in it: in each round all ranks read, then hand on what is for others."""

    def __init__(self, memories: Sequence[torch.Tensor], rank: int, group: ProcessGroup) -> None:
        self._memories, self._rank, self._group = memories, rank, group
        is_nccl = dist.get_backend(group) == "nccl"
        self._device = torch.device("cuda" if is_nccl else "cpu")

    def run(self, queues: Sequence[Sequence[Job]]) -> None:
        """All rounds. What fails here is raised after the last one: others wait for this rank."""
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
                self._hand_on(data, jobs)
        if failure is not None:
            raise failure

    @staticmethod
    def _loaded(queue: Sequence[Job]) -> Iterator[torch.Tensor]:
        threads = num_threads(job.file for job in queue)
        return in_threads(lambda job: job.file.load(job.read), queue, threads)

    def _next(self, job: Job, mine: Iterator[torch.Tensor]) -> torch.Tensor:
        data = next(mine)
        for part in job.parts.get(self._rank, ()):
            self._place(part, values_in(data, job.read, part))
        return data

    def _hand_on(self, data: torch.Tensor, jobs: Sequence[Job | None]) -> None:
        """data: what this rank read in this round."""
        own, here = jobs[self._rank], self._rank
        others = [rank if rank != here else None for rank in range(len(jobs))]
        outgoing = [_parts(own, rank) for rank in others]
        incoming = [_parts(jobs[rank], here) if rank is not None else () for rank in others]
        sent = torch.zeros(sum(map(_length, outgoing)), dtype=torch.uint8)
        for part, box in _boxes(sent, outgoing):
            assert own is not None
            box.copy_(values_in(data, own.read, part))
        received = torch.empty(sum(map(_length, incoming)), dtype=torch.uint8, device=self._device)
        try:
            dist.all_to_all_single(
                received,
                sent.to(self._device),
                [_length(parts) for parts in incoming],
                [_length(parts) for parts in outgoing],
                group=self._group,
            )
        except RuntimeError as error:
            if lack_of_memory(error) is not None:
                raise
            raise CommunicationError(f"a rank was lost during a load: {error}") from error
        for part, box in _boxes(received, incoming):
            self._place(part, box)

    def _place(self, part: Part[Goal], values: torch.Tensor) -> None:
        goal = part.want.target
        at = [a + b for a, b in zip(goal.at, part.local, strict=True)]
        box_of(self._memories[goal.box].detach(), at, part.shape).copy_(values)


def _nothing_of(job: Job) -> torch.Tensor:
    """In the place of what could not be read; all ranks are told so at the end."""
    return torch.zeros(job.size_bytes, dtype=torch.uint8)


def _parts(job: Job | None, rank: int | None) -> Sequence[Part[Goal]]:
    return job.parts.get(rank, ()) if job is not None and rank is not None else ()


def _boxes(
    message: torch.Tensor, groups: Sequence[Sequence[Part[Goal]]]
) -> Iterator[tuple[Part[Goal], torch.Tensor]]:
    """Each part of a message, with its place there."""
    begin = 0
    for part in (part for parts in groups for part in parts):
        flat = message[begin : begin + part.size_bytes]
        yield part, flat.view(DTYPES[part.want.extent.spec.dtype]).view(part.shape)
        begin += _padded(part)


def _padded(part: Part[Goal]) -> int:
    return -(-part.size_bytes // ALIGNED_BYTES) * ALIGNED_BYTES


def _length(parts: Sequence[Part[Goal]]) -> int:
    return sum(map(_padded, parts))
