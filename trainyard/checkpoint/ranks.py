"""Ranks that save together: an error of one is raised on all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from trainyard.errors import InfrastructureError, lack_of_memory
from trainyard.parallel.comm_errors import communicating
from trainyard.parallel.groups import broadcast_object, gather_or_raise

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ranks:
    """The processes that save together; a single process needs no group."""

    group: Any
    rank: int
    world_size: int
    places: tuple[int, ...] | None = None
    """For each rank, the first one to which it can hand tensors (`handover.find_places`), as on one
    host; None: every rank writes its own files."""

    def gather(self, produce: Callable[[], T], give: bool = True) -> list[T]:
        """The results of `produce` on all ranks, on each; if it failed on one, all raise.
        give: see `gather_or_raise`.

        An OSError, such as a full disk or a bad sector, is raised as an InfrastructureError."""

        def converted() -> T:
            try:
                return produce()
            except OSError as error:
                kind = lack_of_memory(error) or InfrastructureError
                raise kind(f"{type(error).__name__}: {error}") from error

        return gather_or_raise(converted, self.group, "save", give=give)

    def share(self, produce: Callable[[], T], source: int) -> T:
        """The result of `produce` on the rank `source`, on all. A gather would take the size of the
        largest result in memory once for each rank."""
        nothing: list[T] = []
        found = self.gather(lambda: [produce()] if self.rank == source else nothing, give=False)
        value = found[self.rank]
        with communicating("checkpoint: sharing what one rank has read"):
            return broadcast_object(value, self.group, source)[0]


ALONE = Ranks(None, 0, 1)
