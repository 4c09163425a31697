"""Points behave as the list of them does."""

from __future__ import annotations

import math

import pytest

from trainyard.charts.points import BLOCK, Points


@pytest.mark.parametrize("count", [0, 1, BLOCK, 2 * BLOCK + 3])
def test_points_equal_a_list(count: int) -> None:
    listed = [(step, step / 2) for step in range(count)]
    points = Points(listed)
    assert len(points) == count
    assert [*points] == listed
    for place in {0, count - 1, -1, -count, BLOCK - 1, BLOCK}:
        if -count <= place < count:
            assert points[place] == listed[place]
        else:
            with pytest.raises(IndexError):
                points[place]
    assert points[BLOCK - 1 : BLOCK + 2] == listed[BLOCK - 1 : BLOCK + 2]
    assert points[::-1000] == listed[::-1000]


def test_values_that_cannot_be_drawn_are_no_points() -> None:
    assert [*Points([(1, None), (2, math.nan), (3, math.inf), (4, 1.0)])] == [(4, 1.0)]
