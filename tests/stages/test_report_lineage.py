"""The picture of a lineage: where nodes and edges go."""

from __future__ import annotations

from xml.etree import ElementTree

from stages.report.lineage import Artifact, Lineage
from stages.report.lineage_picture import GAP, NODE_HEIGHT, narrow, place, topological, wide

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
LINEAGE = Lineage(
    artifacts=tuple(Artifact(key=node, stage=node, digest=node) for node in NODES),
    edges=tuple(EDGES),
    destination="run",
)


def test_edges_point_to_the_right_and_nodes_keep_their_distance() -> None:
    placed = place(NODES, EDGES, "run")
    assert all(placed.layer[a] < placed.layer[b] for a, b in EDGES)
    assert len({placed.y[node] for edge in placed.main_line for node in edge}) == 1
    for a, b in ((a, b) for a in NODES for b in NODES if a < b):
        if placed.layer[a] == placed.layer[b]:
            assert abs(placed.y[a] - placed.y[b]) >= NODE_HEIGHT + GAP
    half = NODE_HEIGHT / 2
    assert all(half <= placed.y[node] <= placed.height - half for node in NODES)


def test_long_edges_pass_between_nodes() -> None:
    placed = place(NODES, EDGES, "run")
    for edge in [("corpus", "tokens"), ("tokenizer", "run"), ("corpus", "evaluation")]:
        for node in NODES:
            if placed.layer[edge[0]] < placed.layer[node] < placed.layer[edge[1]]:
                assert abs(placed.y[node] - placed.y[edge]) >= NODE_HEIGHT / 2 + GAP


def test_a_source_is_placed_beside_the_node_that_needs_it() -> None:
    placed = place([*NODES, "heldout"], [*EDGES, ("heldout", "evaluation")], "run")
    assert placed.layer["heldout"] == placed.layer["evaluation"] - 1


def test_one_node_and_a_cycle_are_placed() -> None:
    assert place(["a"], [], "a").height == NODE_HEIGHT
    cycle = [("a", "b"), ("b", "a")]
    assert topological(["a", "b"], cycle) == ["a", "b"]
    assert place(["a", "b"], cycle, "a").layer == {"a": 0, "b": 1}


def test_both_pictures_show_every_node_and_every_edge() -> None:
    root = ElementTree.fromstring(wide(LINEAGE))
    assert [text.text for text in root.iter("text") if text.get("class") == "name"] == NODES
    drawing, stops = narrow(LINEAGE)
    assert [artifact.key for artifact in stops] == topological(NODES, EDGES)
    for picture in (root, ElementTree.fromstring(drawing)):
        rails = [path.get("class") for path in picture.iter("path")]
        assert len(rails) == len(EDGES)
        assert rails.count("rail main") == 4
