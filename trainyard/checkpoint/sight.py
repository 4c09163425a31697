"""Which ranks see which files of a step that lies in several folders, a part in each. Pure."""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Sight:
    """A folder is called by the first rank that sees it. All ranks have equal ones."""

    of_rank: Sequence[int]
    """For each rank, its folder."""
    folders: Mapping[str, Sequence[int]]
    """For each tensor file, the folders that have it."""

    def source(self, name: str) -> int:
        """The folder from which a file is read for all ranks."""
        held = self.folders[name]
        return held[zlib.crc32(name.encode()) % len(held)]

    def readers(self, folder: int) -> Sequence[int]:
        """The ranks that see a folder, ascending."""
        return self._ranks[folder]

    @cached_property
    def _ranks(self) -> dict[int, list[int]]:
        ranks: dict[int, list[int]] = defaultdict(list)
        for rank, folder in enumerate(self.of_rank):
            ranks[folder].append(rank)
        return dict(ranks)
