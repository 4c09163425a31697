"""The lineage of a run as SVG: `wide` from left to right, `narrow` a column beside a list.

The layout of `wide`: a node's layer is its longest path from a start. The main line, the longest
way to the checkpoint, keeps row 0. Every other node, and every edge that skips a layer, takes the
free row that is nearest to what it is linked to, so that edges run straight and cross no node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stages.report.lineage import Artifact, Edge, Lineage
from trainyard.charts import numbers
from trainyard.charts.markup import Markup, element
from trainyard.charts.numbers import DOT

WIDTH = 1146.0
NODE_WIDTH = 142.0
NODE_HEIGHT = 68.0
GAP = 20.0
MARGIN = 3.0
DIGEST_CHARS = 10
NAME_CHARS = 17

ROW = 58.0
RADIUS = 6.0

DATA = (
    *("collect", "train_tokenizer", "tokenize", "merge"),
    *("retro_db", "retro_embed", "faiss_train", "faiss_add", "faiss_query"),
)
MEASURES = ("evaluate", "benchmark", "plan")


def family(artifact: Artifact) -> str:
    """The CSS class that colors an artifact: source, data, model or measure."""
    if not artifact.stage:
        return "source"
    if artifact.stage in DATA:
        return "data"
    return "measure" if artifact.stage in MEASURES else "model"


def shortened(label: str) -> str:
    """A label that fits into a node; its title has the whole."""
    return label if len(label) <= NAME_CHARS else label[: NAME_CHARS - 1] + "\u2026"


def detail(artifact: Artifact) -> str:
    """Size and duration, as far as known."""
    size, seconds = artifact.size_bytes, artifact.seconds
    parts = [] if size is None else [numbers.size(size)]
    parts += [] if seconds is None else [numbers.duration(seconds)]
    return f" {DOT} ".join(parts)


# --- layout -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GraphLayout:
    """Where nodes and edges go."""

    layer: dict[str, int]
    main_line: list[Edge]
    y: dict[str | Edge, float]
    """Middle of each node, and of each edge that skips a layer."""
    height: float


def topological(nodes: Sequence[str], edges: Sequence[Edge]) -> list[str]:
    """Parents before children, otherwise in the given order; cycles come last."""
    order: list[str] = []
    pending = list(nodes)
    while pending:
        blocked = {target for source, target in edges if source in pending}
        ready = next((node for node in pending if node not in blocked), pending[0])
        pending.remove(ready)
        order.append(ready)
    return order


def place(nodes: Sequence[str], edges: Sequence[Edge], destination: str) -> GraphLayout:
    """A layer and a row for each node; `destination` ends the main line."""
    layer: dict[str, int] = {}
    for node in topological(nodes, edges):
        layer[node] = 1 + max((layer.get(a, -1) for a, b in edges if b == node), default=-1)
    for node in {a for a, _ in edges} - {b for _, b in edges}:  # beside its first child
        layer[node] = max(0, min(layer[b] for a, b in edges if a == node) - 1)

    main_line: list[Edge] = []
    node = destination
    while len(main_line) < len(nodes) and (into := [edge for edge in edges if edge[1] == node]):
        main_line.append(max(into, key=lambda edge: layer[edge[0]]))
        node = main_line[-1][0]

    main_nodes = [destination, *(source for source, _ in main_line)]
    rows: dict[str | Edge, int] = dict.fromkeys(main_nodes, 0)
    taken = {(layer[node], 0) for node in main_nodes}  # (layer, row)

    def take(item: str | Edge, near: Sequence[int], first: int, last: int, room: int) -> None:
        """Give an item the free row that is nearest to the rows `near`. It must be free in layers
        `first` to `last`, and in `room` more at both ends."""
        wanted = sum(near) / len(near) if near else 0.0
        needed = range(first - room, last + room + 1)
        most = len(rows) + 1
        nearest = sorted(range(most, -most - 1, -1), key=lambda row: abs(row - wanted))
        rows[item] = next(r for r in nearest if not any((at, r) in taken for at in needed))
        taken.update((at, rows[item]) for at in range(first, last + 1))

    skipping = [(a, b) for a, b in edges if layer[b] > layer[a] + 1]
    for a, b in sorted(skipping, key=lambda edge: layer[edge[1]] - layer[edge[0]]):
        take((a, b), [rows[n] for n in (a, b) if n in rows], layer[a] + 1, layer[b] - 1, 1)
    others = [node for node in nodes if node not in rows]
    for node in sorted(others, key=lambda node: not any(node in edge for edge in skipping)):
        near = [rows[edge] for edge in skipping if node in edge]
        near = near or [rows[n] for edge in edges if node in edge for n in edge if n in rows]
        take(node, near, layer[node], layer[node], 0)

    middle, top = {}, 0.0
    for row in sorted(set(rows.values())):
        has_nodes = any(isinstance(item, str) for item in rows if rows[item] == row)
        height = NODE_HEIGHT if has_nodes else 0.0
        middle[row] = top + height / 2
        top += height + GAP
    return GraphLayout(
        layer, main_line, {item: middle[row] for item, row in rows.items()}, top - GAP
    )


# --- drawing ----------------------------------------------------------------------------------


def describe(lineage: Lineage) -> str:
    """The picture in sentences."""
    sentences = ["How this run came about."]
    for artifact in lineage.connected:
        origins = " and ".join(one.label for one in lineage.parents(artifact))
        sentences.append(f"{artifact.label}{' from ' + origins if origins else ''}.")
    return " ".join(sentences)


def wide(lineage: Lineage, style: str = "", xmlns: str | None = None) -> Markup:
    """The picture from left to right. style: CSS of a picture that stands alone."""
    shown = lineage.connected
    layout = place([artifact.key for artifact in shown], lineage.edges, lineage.destination)
    last = max(layout.layer.values())
    pitch = (WIDTH - NODE_WIDTH) / max(last, 1)
    pitch = max(min(pitch, 1.9 * NODE_WIDTH), NODE_WIDTH + 24)
    width = NODE_WIDTH + pitch * last + 2 * MARGIN
    main_line = layout.main_line
    return element(
        "svg",
        element("style", Markup(style)) if style else None,
        element("title", describe(lineage), id="lineage-title"),
        *[_rail(edge, layout, pitch) for edge in lineage.edges if edge not in main_line],
        *[_rail(edge, layout, pitch) for edge in main_line],
        *[_node(artifact, lineage, layout, pitch) for artifact in shown],
        viewBox=f"{-MARGIN} {-MARGIN} {width:.1f} {layout.height + 2 * MARGIN:.1f}",
        style=f"max-width:{width:.0f}px",
        class_="wide",
        role="img",
        aria_labelledby="lineage-title",
        xmlns=xmlns,
    )


def _rail(edge: Edge, layout: GraphLayout, pitch: float) -> Markup:
    """A curve in each gap between layers, and a straight line past the nodes between."""
    source, target = edge
    y, end = layout.y[source], layout.y[target]
    d = f"M{pitch * layout.layer[source] + NODE_WIDTH:.1f} {y:.1f}"
    for at in range(layout.layer[source] + 1, layout.layer[target] + 1):
        left, right = pitch * (at - 1) + NODE_WIDTH, pitch * at
        is_last = at == layout.layer[target]
        after, middle = end if is_last else layout.y[edge], (left + right) / 2
        d += f"C{middle:.1f} {y:.1f} {middle:.1f} {after:.1f} {right:.1f} {after:.1f}"
        d += "" if is_last else f"H{right + NODE_WIDTH:.1f}"
        y = after
    return element("path", d=d, class_="rail main" if edge in layout.main_line else "rail")


def _reach(length: float) -> float:
    return 0.0 if length <= ROW else min(8.0 + length / 12, 44.0)


def _css(artifact: Artifact, lineage: Lineage) -> str:
    return family(artifact) + (" destination" if artifact.key == lineage.destination else "")


def _node(artifact: Artifact, lineage: Lineage, layout: GraphLayout, pitch: float) -> Markup:
    x = pitch * layout.layer[artifact.key]
    y = layout.y[artifact.key] - NODE_HEIGHT / 2
    about = (artifact.long_label, artifact.digest, detail(artifact), artifact.key)
    return element(
        "g",
        element("title", "\n".join(filter(None, about))),
        element("rect", width=NODE_WIDTH, height=NODE_HEIGHT, rx=9, class_="box"),
        element("circle", cx=14, cy=18, r=4, class_="mark"),
        element("text", shortened(artifact.label), x=25, y=22.5, class_="name"),
        element("text", artifact.digest[:DIGEST_CHARS], x=12, y=41, class_="digest"),
        element("text", detail(artifact), x=12, y=57, class_="detail"),
        transform=f"translate({x:.1f} {y:.1f})",
        class_=f"node {_css(artifact, lineage)}",
    )


def narrow(lineage: Lineage) -> tuple[Markup, list[Artifact]]:
    """Stops on a vertical track, and the artifacts in the order of the stops.

    Edges to the next stop are straight, all others are arcs that reach out with their length."""
    known = {artifact.key: artifact for artifact in lineage.connected}
    order = topological(list(known), lineage.edges)
    main_line = place(order, lineage.edges, lineage.destination).main_line
    y = {key: ROW * (row + 0.5) for row, key in enumerate(order)}
    x = RADIUS + 2 + max((_reach(y[b] - y[a]) for a, b in lineage.edges), default=0.0)
    paths = []
    for edge in lineage.edges:
        start, end = (y[key] for key in edge)
        bend = x - _reach(end - start) * 4 / 3  # a cubic curve reaches three quarters of its bend
        d = f"M{x:.1f} {start:.1f}C{bend:.1f} {start:.1f} {bend:.1f} {end:.1f} {x:.1f} {end:.1f}"
        paths.append(element("path", d=d, class_="rail main" if edge in main_line else "rail"))
    stops = [
        element("circle", cx=x, cy=y[key], r=RADIUS, class_=f"stop {_css(known[key], lineage)}")
        for key in order
    ]
    width, height = x + RADIUS + 2, ROW * len(order)
    drawing = element("svg", *paths, *stops, width=width, height=height, aria_hidden="true")
    return drawing, [known[key] for key in order]
