"""Line charts: sound whatever the curve, with the spikes of long ones."""

from __future__ import annotations

import math
from xml.etree import ElementTree

import pytest

from trainyard.charts import line_chart as charts
from trainyard.charts.line_chart import Axis, LineChart, Series, line_chart
from trainyard.charts.numbers import fixed, milliseconds, rate
from trainyard.charts.points import Points


def chart(*points: tuple[int, float | None]) -> LineChart | None:
    return line_chart("Loss", [Series("t", Points(points), "a")], fixed(3))


@pytest.mark.parametrize(
    "points",
    [
        [(1, 2.0)],
        [(1, 0.0)],
        [(1, 2.0), (2, 2.0)],
        [(1, math.nan), (2, 3.0), (3, math.inf), (4, None), (5, 1.0)],
        [(0, -1e-9), (1, 1e9)],
        [(step, 1.0 / step) for step in range(1, 5000)],
    ],
    ids=["one point", "zero", "constant", "not finite", "wide", "many"],
)
def test_charts_of_extreme_curves_are_valid(points: list[tuple[int, float | None]]) -> None:
    drawn = chart(*points)
    assert drawn is not None
    plot = drawn.plot()
    ElementTree.fromstring(f"<svg>{plot}</svg>")
    assert "nan" not in plot
    assert "inf" not in plot
    assert len(plot) < 100_000
    rows, total = drawn.rows()
    assert len(rows) == min(total, charts.MAX_ROWS)


def test_a_chart_without_points_is_none() -> None:
    assert chart() is None
    assert chart((1, math.nan)) is None


def test_the_description_of_a_chart_has_first_and_last_values() -> None:
    drawn = chart((1, 2.0), (2, 9.0), (3, 1.0))
    assert drawn is not None
    assert drawn.description == "Loss by step. t: 2.000 at step 1, 1.000 at step 3."


def test_rows_of_two_curves_have_each_step_of_either_once() -> None:
    curves = [
        Series("a", Points((step, 1.0) for step in range(0, 30, 2)), "a"),
        Series("b", Points((step, 2.0) for step in range(0, 30, 3)), "b"),
    ]
    drawn = line_chart("Loss", curves, fixed(0))
    assert drawn is not None
    rows, total = drawn.rows()
    steps = sorted({*range(0, 30, 2), *range(0, 30, 3)})
    assert total == len(steps)
    assert rows == [
        [str(step), "1" if step % 2 == 0 else "", "2" if step % 3 == 0 else ""] for step in steps
    ]


def test_thinning_keeps_spikes_and_ends() -> None:
    points = Points((i, 9.0 if i == 777 else 1.0) for i in range(10_000))
    thinned = charts.thin(points)
    assert len(thinned) <= charts.MAX_POINTS + 2
    assert (777.0, 9.0) in thinned
    assert thinned[0] == points[0]
    assert thinned[-1] == points[-1]


@pytest.mark.parametrize("values", [(4.1, 8.3), (0.0, 6e-4), (-2.0, 3.0), (1e6, 1.1e6)])
def test_scales_contain_all_values_and_have_distinct_ticks(values: tuple[float, float]) -> None:
    scale = charts.value_scale(*values)
    assert scale.low <= min(values) < max(values) <= scale.high
    assert 2 <= len(scale.ticks) <= 8
    labels = charts.tick_labels(scale.ticks, rate)
    assert len(set(labels)) == len(labels)


def test_a_logarithmic_axis_has_ticks_in_its_own_words() -> None:
    axis = Axis("time", milliseconds, milliseconds, is_log=True)
    points = ((0.001, 0.2), (0.004, 0.5), (0.032, 0.9))
    drawn = line_chart("Recall", [Series("r", points, "a", dots=True)], fixed(2), axis=axis)
    assert drawn is not None
    assert [drawn.x.at(x) for x, _ in points] == pytest.approx([0.0, 0.4, 1.0])
    plot = drawn.plot()
    ElementTree.fromstring(f"<svg>{plot}</svg>")
    for words in ("1.00\u202fms", "2.00\u202fms", "5.00\u202fms", "10.0\u202fms"):
        assert f">{words}<" in plot
    assert "step" not in plot + drawn.description
    assert "0.90 at 32.0\u202fms" in drawn.description
    assert drawn.rows()[0][1] == ["4.00\u202fms", "0.50"]


@pytest.mark.parametrize("values", [[3.0], [1e-5, 1e12], [0.7, 0.71]])
def test_ticks_of_any_logarithmic_axis_lie_on_it(values: list[float]) -> None:
    scale = charts.log_scale(values[0], values[-1])
    assert scale.ticks
    assert all(-1e-9 <= scale.at(tick) <= 1 + 1e-9 for tick in scale.ticks)
