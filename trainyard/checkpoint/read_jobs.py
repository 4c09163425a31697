"""Plans the reads of boxes that several ranks ask for, and divides them among ranks. Pure.

Each byte is read once: boxes of the same rows are parts of one read, which goes to the least loaded
rank that needs some of it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from trainyard.checkpoint.copies import EXCHANGED_BYTES
from trainyard.checkpoint.index import Located
from trainyard.checkpoint.safetensors.blocks import BLOCK_BYTES
from trainyard.checkpoint.safetensors.file import TensorFile
from trainyard.checkpoint.safetensors.header import ITEM_BYTES
from trainyard.checkpoint.safetensors.ranges import BoxPart, Read, Want

READS_PER_RANK = 8
"""Minimum, unless reads become too small: balances the bytes over ranks."""

MOST_READ_BYTES, LEAST_READ_BYTES = 4 * BLOCK_BYTES, BLOCK_BYTES
"""Whole blocks: a rank that reads a part of one reads all of it."""

Request: TypeAlias = tuple[str, tuple[int, ...], tuple[int, ...]]
"""A tensor's name, the offset of a box of it, and its shape."""

Locate: TypeAlias = Callable[[str, Sequence[int], Sequence[int]], list[Located]]


@dataclass(frozen=True, slots=True)
class Goal:
    """The target of a box: a rank, the number of its box, and the offset in it."""

    rank: int
    box: int
    at: tuple[int, ...]


Wants: TypeAlias = dict[str, list[Want[Goal]]]
"""For each file, boxes of its tensors."""


@dataclass(frozen=True, slots=True)
class ReadJob:
    """A read, and its parts for each rank."""

    file: TensorFile
    read: Read[Goal]
    parts: Mapping[int, Sequence[BoxPart[Goal]]]

    @property
    def size_bytes(self) -> int:
        """Bytes of the read."""
        return self.read.end - self.read.begin

    @staticmethod
    def of(file: TensorFile, read: Read[Goal]) -> ReadJob:
        """Sort the parts of a read by rank."""
        parts: dict[int, list[BoxPart[Goal]]] = defaultdict(list)
        for part in read.parts:
            parts[part.want.target.rank].append(part)
        return ReadJob(file, read, dict(parts))


@dataclass(frozen=True, slots=True)
class Delivery:
    """A box in a message, for the rank that receives it."""

    box: int
    """Number of the box that it is a part of."""
    at: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str
    """In the file."""

    @property
    def size_bytes(self) -> int:
        """Bytes of its values."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    @staticmethod
    def of(part: BoxPart[Goal]) -> Delivery:
        """A part of a read."""
        goal = part.want.target
        at = tuple(a + b for a, b in zip(goal.at, part.local, strict=True))
        return Delivery(goal.box, at, part.shape, part.want.extent.spec.dtype)


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


def read_bytes_for(wants: Wants, num_readers: int, num_senders: int) -> int:
    """Maximum size of a read. num_senders: ranks that may send to one rank in a round."""
    extents = {(w.extent.begin, name): w.extent for name in wants for w in wants[name]}
    size = sum(extent.spec.size_bytes for extent in extents.values())
    fitting = min(EXCHANGED_BYTES // num_senders, size // (READS_PER_RANK * num_readers))
    return min(MOST_READ_BYTES, max(LEAST_READ_BYTES, fitting))


def plan_jobs(opened: Mapping[str, TensorFile], wants: Wants, read_bytes: int) -> list[ReadJob]:
    """The reads of all files, in order."""
    return [
        ReadJob.of(opened[name], read)
        for name in sorted(wants)
        for read in opened[name].plan(wants[name], read_bytes)
    ]


def assign_jobs(jobs: Sequence[ReadJob], readers: Sequence[int]) -> dict[int, list[ReadJob]]:
    """The reads of each reader: balanced bytes, and where possible of data that it needs itself.

    First come those of which it sends a part."""
    loads = dict.fromkeys(readers, 0)
    queues: dict[int, list[ReadJob]] = {rank: [] for rank in readers}
    for job in jobs:
        able = [rank for rank in job.parts if rank in loads]
        rank = min(able or readers, key=lambda rank: (loads[rank], rank))
        loads[rank] += job.size_bytes
        queues[rank].append(job)
    return {
        rank: sorted(queues[rank], key=lambda job: job.parts.keys() == {rank}) for rank in readers
    }


def num_sent(jobs: Sequence[ReadJob], rank: int) -> int:
    """How many jobs of a rank have parts for others; they are its first."""
    return sum(job.parts.keys() != {rank} for job in jobs)
