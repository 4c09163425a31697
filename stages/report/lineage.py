"""The lineage of a run as a picture: artifacts, and what went into what.

Drawn twice, as columns for a wide page and as tracks for a narrow one; the page shows the one that
fits. Knows nothing of manifests."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from stages.report import formats
from stages.report.facts import Artifact, Lineage
from stages.report.formats import DOT
from stages.report.layout import Bus, Edge, columns, main_line, tracks
from stages.report.markup import Markup, el

WIDTH = 1146.0
NODE_WIDTH = 142.0
NODE_HEIGHT = 68.0
GAP = 20.0
MARGIN = 3.0
DIGEST_CHARS = 10

ROW = 58.0
LANE = 15.0
RADIUS = 6.0

DATA = ("collect", "train_tokenizer", "tokenize", "merge")
MEASURES = ("evaluate", "benchmark", "plan")


def kind(artifact: Artifact) -> str:
    """The family that decides a node's colour."""
    if not artifact.stage:
        return "source"
    if artifact.stage in DATA:
        return "data"
    return "measure" if artifact.stage in MEASURES else "model"


def digest_text(artifact: Artifact) -> str:
    """The beginning of the digest, or how many artifacts stand together."""
    return artifact.digest[:DIGEST_CHARS]


def detail(artifact: Artifact) -> str:
    """Size and duration, as far as known."""
    parts = []
    if artifact.size_bytes is not None:
        parts.append(formats.size(artifact.size_bytes))
    if artifact.seconds is not None:
        parts.append(formats.duration(artifact.seconds))
    return f" {DOT} ".join(parts)


def tooltip(artifact: Artifact) -> str:
    """Everything about a node in a few lines."""
    lines = [artifact.long_label, artifact.digest, detail(artifact), artifact.key]
    return "\n".join(line for line in lines if line)


def picture(lineage: Lineage) -> Markup:
    """Both drawings; artifacts that nothing connects are left to the table."""
    linked = {key for edge in lineage.edges for key in edge} | {lineage.destination}
    shown = [a for a in lineage.artifacts if a.key in linked]
    described = " ".join(_sentence(a, lineage, {b.key: b for b in shown}) for a in shown)
    return el(
        "div",
        wide(shown, lineage.edges, lineage.destination, described),
        narrow(shown, lineage.edges, lineage.destination),
        class_="lineage",
    )


def _sentence(artifact: Artifact, lineage: Lineage, known: dict[str, Artifact]) -> str:
    came = [known[source].label for source, target in lineage.edges if target == artifact.key]
    return f"{artifact.label}{' from ' + ' and '.join(came) if came else ''}."


# --- wide -------------------------------------------------------------------------------------


def wide(
    shown: Sequence[Artifact], edges: Sequence[Edge], destination: str, described: str
) -> Markup:
    """From left to right."""
    keys = [artifact.key for artifact in shown]
    line = main_line(keys, edges, destination)
    plan = columns(keys, edges, line, NODE_HEIGHT, GAP)
    pitch = (WIDTH - NODE_WIDTH) / max(plan.num_layers - 1, 1)
    pitch = max(min(pitch, 1.9 * NODE_WIDTH), NODE_WIDTH + 24)
    width = NODE_WIDTH + pitch * (plan.num_layers - 1)
    main = set(line)
    rails = [
        _rail(plan.routes[edge], plan.layer, plan.y, pitch, edge in main)
        for edge in sorted(edges, key=lambda e: e in main)
    ]
    nodes = [
        _node(a, pitch * plan.layer[a.key], plan.y[a.key] - NODE_HEIGHT / 2, a.key == destination)
        for a in shown
    ]
    box = (-MARGIN, -MARGIN, width + 2 * MARGIN, plan.height + 2 * MARGIN)
    return el(
        "svg",
        el("title", "How this run came about. " + described, id="lineage-title"),
        *rails,
        *nodes,
        viewBox=" ".join(f"{value:.1f}" for value in box),
        style=f"max-width:{width + 2 * MARGIN:.0f}px",
        class_="wide",
        role="img",
        aria_labelledby="lineage-title",
    )


def _rail(
    route: Sequence[str],
    layer: dict[str, int],
    y: dict[str, float],
    pitch: float,
    is_main: bool,
) -> Markup:
    start = pitch * layer[route[0]] + NODE_WIDTH
    d = f"M{start:.1f} {y[route[0]]:.1f}"
    for before, after in itertools.pairwise(route):
        left = pitch * layer[before] + NODE_WIDTH
        right = pitch * layer[after]
        bend = (right - left) / 2
        d += f"C{left + bend:.1f} {y[before]:.1f} {right - bend:.1f} {y[after]:.1f}"
        d += f" {right:.1f} {y[after]:.1f}"
        if after is not route[-1]:
            d += f"H{right + NODE_WIDTH:.1f}"
    return el("path", d=d, class_="rail main" if is_main else "rail")


def _node(artifact: Artifact, x: float, y: float, is_destination: bool) -> Markup:
    css = f"node {kind(artifact)}{' destination' if is_destination else ''}"
    return el(
        "g",
        el("title", tooltip(artifact)),
        el("rect", width=NODE_WIDTH, height=NODE_HEIGHT, rx=9, class_="box"),
        el("circle", cx=14, cy=18, r=4, class_="mark"),
        el("text", artifact.label, x=25, y=22.5, class_="name"),
        el("text", digest_text(artifact), x=12, y=41, class_="digest"),
        el("text", detail(artifact), x=12, y=57, class_="detail"),
        transform=f"translate({x:.1f} {y:.1f})",
        class_=css,
    )


# --- narrow -----------------------------------------------------------------------------------


def narrow(shown: Sequence[Artifact], edges: Sequence[Edge], destination: str) -> Markup:
    """From top to bottom, as a list with a track beside it."""
    keys = [artifact.key for artifact in shown]
    plan = tracks(keys, edges)
    main = set(main_line(keys, edges, destination))
    row = {key: ROW * (i + 0.5) for i, key in enumerate(plan.order)}
    column = LANE * plan.num_lanes + RADIUS + 2
    paths = [_bus(bus, row, column) for bus in plan.buses]
    for edge in sorted(plan.straight, key=lambda e: e in main):
        d = f"M{column:.1f} {row[edge[0]]:.1f}V{row[edge[1]]:.1f}"
        paths.append(el("path", d=d, class_="rail main" if edge in main else "rail"))
    known = {artifact.key: artifact for artifact in shown}
    stops = [
        el(
            "circle",
            cx=column,
            cy=row[key],
            r=RADIUS,
            class_=f"stop {kind(known[key])}{' destination' if key == destination else ''}",
        )
        for key in plan.order
    ]
    width, height = column + RADIUS + 2, ROW * len(plan.order)
    drawing = el(
        "svg",
        *paths,
        *stops,
        viewBox=f"0 0 {width:.1f} {height:.1f}",
        width=width,
        height=height,
        aria_hidden="true",
    )
    items = [_item(known[key]) for key in plan.order]
    return el("div", drawing, el("ol", *items, style=f"--row:{ROW:.0f}px"), class_="narrow")


def _bus(bus: Bus, row: dict[str, float], column: float) -> Markup:
    x, bend = column - LANE * (bus.lane + 1), ROW * 0.45
    d = ""
    for target in bus.targets:
        top, bottom = row[bus.source], row[target]
        d += f"M{column:.1f} {top:.1f}C{x:.1f} {top:.1f} {x:.1f} {top:.1f} {x:.1f} {top + bend:.1f}"
        d += f"V{bottom - bend:.1f}"
        d += f"C{x:.1f} {bottom:.1f} {x:.1f} {bottom:.1f} {column:.1f} {bottom:.1f}"
    return el("path", d=d, class_="rail")


def _item(artifact: Artifact) -> Markup:
    about = el(
        "span",
        el("span", digest_text(artifact), class_="digest"),
        f" {DOT} " + detail(artifact) if detail(artifact) else None,
        class_="detail",
    )
    return el("li", el("span", artifact.label, class_="name"), about)
