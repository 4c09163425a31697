"""The points of a curve, in 16 bytes each: a run has millions of steps."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import TypeAlias, overload

from trainyard.charts.numbers import is_number

Point: TypeAlias = tuple[float, float]

BLOCK = 4096
"""Points of an array. One array for all would move as it grows, and several that grow side by side
leave holes in memory as large as themselves."""


class Points(Sequence[Point]):
    """Points (x, y) by steps, which are integers."""

    def __init__(self, points: Iterable[tuple[int, float | None]] = ()) -> None:
        self._blocks: list[tuple[array[int], array[float]]] = []
        self._count = 0
        for step, value in points:
            self.add(step, value)

    def add(self, step: int, value: float | None) -> None:
        """Add a point, unless it has no value that can be drawn."""
        if value is not None and is_number(value):
            if self._count % BLOCK == 0:
                self._blocks.append((array("q"), array("d")))
            steps, values = self._blocks[-1]
            steps.append(step)
            values.append(value)
            self._count += 1

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Point]:
        # That of Sequence asks for each point by its place, five times slower.
        return chain.from_iterable(zip(*block, strict=True) for block in self._blocks)

    @overload
    def __getitem__(self, place: int) -> Point: ...

    @overload
    def __getitem__(self, place: slice) -> Sequence[Point]: ...

    def __getitem__(self, place: int | slice) -> Point | Sequence[Point]:
        if isinstance(place, slice):
            return [self[each] for each in range(self._count)[place]]
        block, within = divmod(range(self._count)[place], BLOCK)
        steps, values = self._blocks[block]
        return steps[within], values[within]
