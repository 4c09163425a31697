"""Which ranks see the same folder: the ranks of a node for its own disk, all for a shared one.

Each rank writes a file and looks for those of the others, since host names do not show whether a
path is shared."""

from __future__ import annotations

import socket
import uuid
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from trainyard.artifacts import store
from trainyard.artifacts.urls import join
from trainyard.checkpoint.ranks import Ranks

PROBE = ".place-"
"""Prefix of these files."""


@dataclass(frozen=True, slots=True)
class Visibility:
    """The folders at one path, each with the ranks that see it."""

    of_rank: tuple[int, ...]
    """For each rank, the first rank that sees the same folder."""
    hosts: tuple[str, ...]
    """For each rank, its host, for messages."""
    rank: int

    @property
    def is_first(self) -> bool:
        """Whether this rank is the first that sees its folder, and acts for the others."""
        return self.of_rank[self.rank] == self.rank

    @property
    def firsts(self) -> list[int]:
        """The first rank of every folder, ascending."""
        return sorted(set(self.of_rank))

    def ranks(self, first: int) -> list[int]:
        """The ranks that see the folder of rank `first`."""
        return [rank for rank, other in enumerate(self.of_rank) if other == first]

    def within(self, places: Sequence[int]) -> tuple[int, ...]:
        """For each rank, the first of its place (see `Ranks`) that sees the same folder."""
        firsts: dict[tuple[int, int], int] = {}
        both = zip(places, self.of_rank, strict=True)
        return tuple(firsts.setdefault(key, rank) for rank, key in enumerate(both))

    @property
    def description(self) -> str:
        """The number of folders and their hosts, for messages."""
        hosts = list(dict.fromkeys(self.hosts[first] for first in self.firsts))
        count = len(self.firsts)
        shown = ", ".join(hosts[:4]) + (", ..." if len(hosts) > 4 else "")
        return f"{count} folder{'s' if count > 1 else ''} on {shown}"


Ranges: TypeAlias = tuple[tuple[int, int], ...]
"""Numbers as ascending ranges (begin, end)."""


def ranges_of(numbers: Iterable[int]) -> Ranges:
    """Ascending numbers as ranges."""
    found: list[tuple[int, int]] = []
    for number in numbers:
        if found and found[-1][1] == number:
            found[-1] = (found[-1][0], number + 1)
        else:
            found.append((number, number + 1))
    return tuple(found)


def is_in(number: int, ranges: Ranges) -> bool:
    """Whether some range has a number."""
    at = bisect_right(ranges, number, key=lambda one: one[0])
    return at > 0 and number < ranges[at - 1][1]


def visible_to_all(ranks: Ranks) -> Visibility:
    """All ranks see the same folder, as at a URL."""
    world = ranks.world_size
    return Visibility((0,) * world, (socket.gethostname(),) * world, ranks.rank)


def find_visibility(root_url: str, ranks: Ranks) -> Visibility:
    """Which ranks see the same folder at the local path `root_url`; all ranks call this.

    Raises the error of a rank that cannot write there."""
    own = f"{PROBE}{ranks.rank}-{uuid.uuid4().hex}"
    url = join(root_url, own)

    def mark() -> tuple[str, str]:
        store.write_bytes(url, b"")
        return own, socket.gethostname()

    marks = ranks.gather(mark)
    names = [name for name, _ in marks]

    def look() -> Ranges:
        here = store.list_folder(root_url)
        return ranges_of([rank for rank, name in enumerate(names) if name in here])

    try:
        seen = ranks.gather(look)
    finally:
        store.delete(url)
    return Visibility(firsts_of(seen), tuple(host for _, host in marks), ranks.rank)


def firsts_of(seen: Sequence[Ranges]) -> tuple[int, ...]:
    """For each rank, the first rank that it sees and that sees it. A slow file system may show
    less; then one folder counts as two, each with all files."""
    firsts: list[int] = []
    for rank, ranges in enumerate(seen):
        others = (other for begin, end in ranges for other in range(begin, min(end, rank)))
        first = next((other for other in others if is_in(rank, seen[other])), rank)
        firsts.append(first if first == rank else firsts[first])
    return tuple(firsts)
