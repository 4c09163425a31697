"""The points of a curve, in 16 bytes each: a run has millions of steps."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import TypeAlias, overload

from trainyard.charts.numbers import is_number

Point: TypeAlias = tuple[float, float]


class Points(Sequence[Point]):
    """Points (x, y) by steps, which are integers."""

    def __init__(self, points: Iterable[tuple[int, float | None]] = ()) -> None:
        self._steps, self._values = array("q"), array("d")
        for step, value in points:
            self.add(step, value)

    def add(self, step: int, value: float | None) -> None:
        """Add a point, unless it has no value that can be drawn."""
        if value is not None and is_number(value):
            self._steps.append(step)
            self._values.append(value)

    @property
    def values(self) -> array[float]:
        """Those of all points, in their order; not to be changed."""
        return self._values

    def __len__(self) -> int:
        return len(self._steps)

    @overload
    def __getitem__(self, place: int) -> Point: ...

    @overload
    def __getitem__(self, place: slice) -> Sequence[Point]: ...

    def __getitem__(self, place: int | slice) -> Point | Sequence[Point]:
        if isinstance(place, int):
            return self._steps[place], self._values[place]
        return list(zip(self._steps[place], self._values[place], strict=True))
