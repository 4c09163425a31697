"""Whether hosts have memory for copies of what their ranks save."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass

from trainyard.artifacts.process import boot_mark
from trainyard.checkpoint.ranks import Ranks
from trainyard.machine import free_memory_bytes

SHARE = 0.75
"""Of the free memory of a host, the part that copies may take: batches and caches of files need
some, and locked memory is never given back to others."""


@dataclass(frozen=True, slots=True)
class HostRoom:
    """Memory of a host, and what the copies of all its ranks take."""

    name: str
    needed_bytes: int
    free_bytes: int
    """The least that a rank sees, as each may have a limit of its own."""

    @property
    def is_enough(self) -> bool:
        """Whether copies leave room for everything else."""
        return self.needed_bytes <= SHARE * self.free_bytes

    def __str__(self) -> str:
        gigabytes = f"{self.needed_bytes / 1e9:.1f} GB of {self.free_bytes / 1e9:.1f} GB"
        return f"{gigabytes} of memory that are free on {self.name}"


def tightest_host(size_bytes: int, ranks: Ranks) -> HostRoom:
    """The host that has least room for its copies; all of `ranks` call it, each with the size of
    its own copies."""
    return tightest(ranks.gather(lambda: (_host(), size_bytes, free_memory_bytes())))


def tightest(found: Sequence[tuple[tuple[str, str], int, int]]) -> HostRoom:
    """Of what each rank found: its host by mark and name, the bytes of its copies, free bytes."""
    hosts: dict[str, HostRoom] = {}
    for (mark, name), needed, free in found:
        before = hosts.get(mark, HostRoom(name, 0, free))
        hosts[mark] = HostRoom(
            before.name, before.needed_bytes + needed, min(before.free_bytes, free)
        )
    return min(hosts.values(), key=lambda host: SHARE * host.free_bytes - host.needed_bytes)


def _host() -> tuple[str, str]:
    name = socket.gethostname()
    try:
        return boot_mark(), name  # containers of one machine share its memory under many names
    except OSError:
        return name, name
