"""Whether hosts have memory for copies of what their ranks save."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from trainyard.artifacts.process import boot_mark
from trainyard.checkpoint.ranks import Ranks
from trainyard.machine import free_memory_bytes

SHARE = 0.75
"""Of the free memory of a host, the part that copies may take: batches and caches of files need
some, and locked memory is never given back to others."""


@dataclass(frozen=True, slots=True)
class HostRoom:
    """Memory of a host or of a container, and what the copies of all its ranks take."""

    name: str
    needed_bytes: int
    free_bytes: int
    """The least that a rank sees."""

    @property
    def is_enough(self) -> bool:
        """Whether copies leave room for everything else."""
        return self.needed_bytes <= SHARE * self.free_bytes

    def __str__(self) -> str:
        gigabytes = f"{self.needed_bytes / 1e9:.1f} GB of {self.free_bytes / 1e9:.1f} GB"
        return f"{gigabytes} of memory that are free on {self.name}"


class RankRoom(NamedTuple):
    """What a rank finds."""

    mark: str
    """Of the machine."""
    name: str
    """Of the machine, or of a container on it."""
    needed_bytes: int
    free_bytes: int
    """Of the machine."""
    left_bytes: int
    """Of these, what the control groups of the rank leave."""


def tightest_host(size_bytes: int, ranks: Ranks) -> HostRoom:
    """The host or container that has least room for its copies; all of `ranks` call it, each with
    the size of its own copies."""
    return tightest(ranks.gather(lambda: RankRoom(*_host(), size_bytes, *free_memory_bytes())))


def tightest(found: Sequence[RankRoom]) -> HostRoom:
    """Of what each rank found: ranks of a machine share its memory, and those of a container what
    its control group leaves."""
    rooms: dict[tuple[str, ...], HostRoom] = {}
    for one in found:
        for key, free in (
            ((one.mark,), one.free_bytes),
            ((one.mark, one.name), one.left_bytes),
        ):
            room = rooms.get(key, HostRoom(one.name, 0, free))
            needed = room.needed_bytes + one.needed_bytes
            rooms[key] = HostRoom(room.name, needed, min(room.free_bytes, free))
    return min(rooms.values(), key=lambda room: SHARE * room.free_bytes - room.needed_bytes)


def _host() -> tuple[str, str]:
    name = socket.gethostname()
    try:
        return boot_mark(), name  # containers of one machine share its memory under many names
    except OSError:
        return name, name
