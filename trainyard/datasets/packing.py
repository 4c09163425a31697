"""Which items share a sample: first fit, in the order given. Pure functions of lengths."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Bins:
    """Items grouped into samples."""

    items: NDArray[np.int64]
    """(n,) the items of all samples, sample by sample, in their order within each."""
    bounds: NDArray[np.int64]
    """(samples + 1,) sample k is items[bounds[k]:bounds[k + 1]]."""

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def __getitem__(self, sample: int) -> list[int]:
        items: list[int] = self.items[self.bounds[sample] : self.bounds[sample + 1]].tolist()
        return items


def first_fit(lengths: NDArray[np.int64], capacity: int) -> Bins:
    """Each item in turn goes to the first sample that has room for it, else to a new one; one
    longer than a sample has it alone."""
    chosen = np.empty(len(lengths), np.int64)
    rooms = _Rooms(len(lengths))
    count = 0
    for item, length in enumerate(np.minimum(lengths, capacity).tolist()):
        place = rooms.first_with(length)
        if place >= count:
            place, count = count, count + 1
            rooms.set(place, capacity)
        rooms.set(place, rooms.of(place) - length)
        chosen[item] = place
    bounds = np.zeros(count + 1, np.int64)
    np.cumsum(np.bincount(chosen, minlength=count), out=bounds[1:])
    return Bins(np.argsort(chosen, kind="stable"), bounds)


class _Rooms:
    """Room left in each sample, in a tree whose nodes hold the most of what is under them."""

    def __init__(self, count: int) -> None:
        self._leaves = 1 << max(count - 1, 1).bit_length()
        self._most = [-1] * (2 * self._leaves)

    def of(self, place: int) -> int:
        return self._most[self._leaves + place]

    def first_with(self, length: int) -> int:
        """The first place with as much room; behind the last place if there is none."""
        if self._most[1] < length:
            return self._leaves
        node = 1
        while node < self._leaves:
            node *= 2
            node += self._most[node] < length
        return node - self._leaves

    def set(self, place: int, room: int) -> None:
        node, most = self._leaves + place, self._most
        most[node] = room
        while node > 1:
            node //= 2
            best = max(most[2 * node], most[2 * node + 1])
            if most[node] == best:
                break
            most[node] = best
