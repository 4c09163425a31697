"""Which ranks see one folder: those of a node its own disk, all of them a shared file system.

Found out by looking, not by host names: what is shared, and what only has the same path, no name
tells."""

from __future__ import annotations

import socket
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from trainyard.artifacts import store
from trainyard.artifacts.urls import join
from trainyard.checkpoint.ranks import Ranks

PROBE = ".place-"
"""Begins the names of the files by which ranks see who is with them."""


@dataclass(frozen=True, slots=True)
class Places:
    """The folders of one path, each with the ranks that see it."""

    of_rank: tuple[int, ...]
    """Of each rank, the first rank that sees the same folder as it."""
    hosts: tuple[str, ...]
    """Of each rank, where it runs: for messages."""
    rank: int

    @property
    def is_first(self) -> bool:
        """Whether this rank is the first of its place, and does what one of them is to do."""
        return self.of_rank[self.rank] == self.rank

    @property
    def firsts(self) -> list[int]:
        """The first rank of every place, ascending."""
        return sorted(set(self.of_rank))

    def ranks(self, first: int) -> list[int]:
        """The ranks of a place, by the first of them."""
        return [rank for rank, place in enumerate(self.of_rank) if place == first]

    @property
    def words(self) -> str:
        """How many, and where."""
        hosts = list(dict.fromkeys(self.hosts[first] for first in self.firsts))
        count = len(self.firsts)
        shown = ", ".join(hosts[:4]) + (", ..." if len(hosts) > 4 else "")
        return f"{count} folder{'s' if count > 1 else ''} on {shown}"


def one_place(ranks: Ranks) -> Places:
    """All ranks see the same, as of a URL."""
    world = ranks.world_size
    return Places((0,) * world, (socket.gethostname(),) * world, ranks.rank)


def find_places(root_url: str, ranks: Ranks) -> Places:
    """Who sees the same folder at `root_url`, which is local to each rank; all call this.

    Raises what one of them met that cannot write there."""
    own = f"{PROBE}{ranks.rank}-{uuid.uuid4().hex}"
    url = join(root_url, own)

    def mark() -> tuple[str, str]:
        store.write_bytes(url, b"")
        return own, socket.gethostname()

    marks = ranks.gather(mark)
    names = [name for name, _ in marks]

    def look() -> list[int]:
        here = store.list_folder(root_url)
        return [rank for rank, name in enumerate(names) if name in here]

    try:
        seen = ranks.gather(look)
    finally:
        store.delete(url)
    return Places(_firsts(seen), tuple(host for _, host in marks), ranks.rank)


def _firsts(seen: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Of each rank, the first of those that it sees and that see it. File systems that lag show
    less, so that a place falls into two, each with all that a place has."""
    firsts: list[int] = []
    for rank, others in enumerate(seen):
        both = (other for other in others if other < rank and rank in seen[other])
        first = min(both, default=rank)
        firsts.append(first if first == rank else firsts[first])
    return tuple(firsts)
