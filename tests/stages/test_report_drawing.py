"""What the run card draws with: layouts of the lineage, charts, numbers in words, markup."""

from __future__ import annotations

import math

import pytest

from stages.report import charts, formats, layout
from stages.report.charts import Series, line_chart
from stages.report.collect import options_of
from stages.report.markup import Markup, el
from tests.stages.markup_checks import check_sound

HOSTILE = '<script>alert("x")</script><img src=x onerror=alert(1)>\' & \x00\ud800'

# --- layout -----------------------------------------------------------------------------------

NODES = ["corpus", "tokenizer", "tokens", "merged", "run", "export", "evaluation"]
EDGES = [
    ("corpus", "tokenizer"),
    ("corpus", "tokens"),
    ("tokenizer", "tokens"),
    ("tokens", "merged"),
    ("tokenizer", "run"),
    ("merged", "run"),
    ("run", "export"),
    ("run", "evaluation"),
    ("corpus", "evaluation"),
]


def test_edges_point_to_the_right_and_nodes_keep_their_distance() -> None:
    line = layout.main_line(NODES, EDGES, "run")
    placed = layout.columns(NODES, EDGES, line, node_height=60, gap=20)
    assert all(placed.layer[a] < placed.layer[b] for a, b in EDGES)
    straight = [placed.y[node] for edge in line for node in edge]
    assert max(straight) - min(straight) < 0.1
    for a, b in ((a, b) for a in NODES for b in NODES if a < b):
        if placed.layer[a] == placed.layer[b]:
            assert abs(placed.y[a] - placed.y[b]) >= 79.9
    assert all(30 - 0.1 <= placed.y[n] <= placed.height - 30 + 0.1 for n in NODES)


def test_long_edges_pass_between_nodes() -> None:
    line = layout.main_line(NODES, EDGES, "run")
    placed = layout.columns(NODES, EDGES, line, node_height=60, gap=20)
    for waypoint in placed.routes["corpus", "evaluation"][1:-1]:
        for node in NODES:
            if placed.layer[node] == placed.layer[waypoint]:
                assert abs(placed.y[node] - placed.y[waypoint]) >= 49.9


def test_tracks_show_every_edge_once_and_lanes_do_not_overlap() -> None:
    tracks = layout.tracks(NODES, EDGES)
    row = {node: i for i, node in enumerate(tracks.order)}
    on_buses = [(bus.source, target) for bus in tracks.buses for target in bus.targets]
    assert sorted([*tracks.straight, *on_buses]) == sorted(EDGES)
    spans = [(b.lane, row[b.source], max(row[t] for t in b.targets)) for b in tracks.buses]
    for i, (lane, top, bottom) in enumerate(spans):
        for other, first, last in spans[:i]:
            assert lane != other or bottom <= first or last <= top


def test_layout_of_one_node_and_of_a_cycle_ends() -> None:
    assert layout.columns(["a"], [], [], 10, 5).num_layers == 1
    assert layout.topological(["a", "b"], [("a", "b"), ("b", "a")]) == ["a", "b"]


# --- charts -----------------------------------------------------------------------------------


def chart(*points: tuple[float, float | None]) -> Markup:
    return line_chart("x", "Loss", [Series("t", charts.finite(points), "a")], formats.fixed(3))


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
def test_charts_of_odd_curves_are_sound(points: list[tuple[float, float | None]]) -> None:
    drawn = chart(*points)
    check_sound(drawn)
    assert len(drawn) < 100_000


def test_chart_of_nothing_is_nothing() -> None:
    assert chart() == ""
    assert chart((1, math.nan)) == ""


def test_thinning_keeps_spikes_and_ends() -> None:
    points = [(float(i), 9.0 if i == 777 else 1.0) for i in range(10_000)]
    thinned = charts.thin(points)
    assert len(thinned) <= charts.MAX_POINTS + 2
    assert (777.0, 9.0) in thinned
    assert thinned[0] == points[0]
    assert thinned[-1] == points[-1]


@pytest.mark.parametrize("values", [(4.1, 8.3), (0.0, 6e-4), (-2.0, 3.0), (1e6, 1.1e6)])
def test_scales_hold_all_values_and_have_ticks_that_differ(values: tuple[float, float]) -> None:
    scale = charts.value_scale(values)
    assert scale.low <= min(values) < max(values) <= scale.high
    assert 2 <= len(scale.ticks) <= 8
    labels = charts.tick_labels(scale.ticks, formats.rate)
    assert len(set(labels)) == len(labels)


# --- words and refusals -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (formats.scaled(3_412_224), "3.41 M"),
        (formats.scaled(1234), "1 234"),
        (formats.size(820), "820 B"),
        (formats.size(43_100_000), "43.1 MB"),
        (formats.duration(0.04), "0.0 s"),
        (formats.duration(59.9), "1 min"),
        (formats.duration(127), "2 min 7 s"),
        (formats.duration(90_061), "1 d 1 h"),
        (formats.rate(6e-4), "6e\u22124"),
        (formats.rate(0.0), "0"),
        (formats.shown(math.nan), "not finite"),
    ],
)
def test_numbers_read_well(shown: str, text: str) -> None:
    assert shown.replace(formats.NARROW, " ") == text


def test_options_know_their_defaults() -> None:
    options = options_of({"num_layers": 2, "swiglu": True, "clip_grad": 1.0, "finetune": False})
    assert [option.name for option in options if option.differs] == ["num_layers", "swiglu"]


def test_elements_escape_what_is_not_markup() -> None:
    assert el("a", "<", title='"') == '<a title="&quot;">&lt;</a>'
    assert el("p", el("b", "x"), None) == "<p><b>x</b></p>"
