"""Where the nodes of a small acyclic graph go. Pure functions of names and edges.

`columns` draws from left to right in layers (Sugiyama: layers by longest path, order by
barycentre, places by averaging); `tracks` draws from top to bottom, one node a row, with what
skips rows on lanes beside them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

Edge = tuple[str, str]

SWEEPS = 12
HEAVY = 1e6
"""Weight of what stays where it is while others make room."""


@dataclass(frozen=True, slots=True)
class Columns:
    """Nodes in layers; a long edge passes a waypoint in each layer between."""

    layer: dict[str, int]
    y: dict[str, float]
    """Middle of each node or waypoint."""
    routes: dict[Edge, tuple[str, ...]]
    """Of every edge its nodes and waypoints, from end to end."""
    height: float

    @property
    def num_layers(self) -> int:
        """How many layers there are."""
        return max(self.layer.values(), default=-1) + 1


def parents_of(nodes: Sequence[str], edges: Iterable[Edge]) -> dict[str, list[str]]:
    """Of every node those that lead to it."""
    found: dict[str, list[str]] = {node: [] for node in nodes}
    for source, target in edges:
        found[target].append(source)
    return found


def children_of(nodes: Sequence[str], edges: Iterable[Edge]) -> dict[str, list[str]]:
    """Of every node those that it leads to."""
    return parents_of(nodes, [(target, source) for source, target in edges])


def topological(nodes: Sequence[str], edges: Sequence[Edge]) -> list[str]:
    """Parents before children, else in the order given; what is in a cycle comes last."""
    parents, order = parents_of(nodes, edges), []
    pending = list(nodes)
    while pending:
        ready = next((n for n in pending if all(p in order for p in parents[n])), pending[0])
        pending.remove(ready)
        order.append(ready)
    return order


def layers(nodes: Sequence[str], edges: Sequence[Edge]) -> dict[str, int]:
    """Longest path from a start; starts then move up to the node that first needs them."""
    parents, children = parents_of(nodes, edges), children_of(nodes, edges)
    layer: dict[str, int] = {}
    for node in topological(nodes, edges):
        layer[node] = 1 + max((layer.get(parent, -1) for parent in parents[node]), default=-1)
    for node in nodes:
        if not parents[node] and children[node]:
            layer[node] = max(0, min(layer[child] for child in children[node]) - 1)
    return layer


def main_line(nodes: Sequence[str], edges: Sequence[Edge], destination: str) -> list[Edge]:
    """The longest way to a node: what a run is about, beside which all else is a siding."""
    parents, layer = parents_of(nodes, edges), layers(nodes, edges)
    line: list[Edge] = []
    node = destination
    while parents.get(node) and len(line) < len(nodes):
        parent = max(parents[node], key=lambda p: layer[p])
        line.append((parent, node))
        node = parent
    return line[::-1]


# --- left to right ----------------------------------------------------------------------------


def columns(
    nodes: Sequence[str],
    edges: Sequence[Edge],
    line: Sequence[Edge],
    node_height: float,
    gap: float,
) -> Columns:
    """Layers, an order without needless crossings, and heights that keep the main line straight."""
    layer = layers(nodes, edges)
    routes = _routes(edges, layer)
    points = dict.fromkeys(itertools.chain(nodes, *routes.values()))
    depth = {point: _layer_of(point, layer) for point in points}
    ranks: list[list[str]] = [[] for _ in range(max(depth.values(), default=-1) + 1)]
    for point in points:
        ranks[depth[point]].append(point)
    links = [pair for route in routes.values() for pair in itertools.pairwise(route)]
    ranks = _ordered(ranks, links)
    tall = {point: node_height if point in layer else 0.0 for point in points}
    weight = dict.fromkeys(points, 1.0) | {node: HEAVY for edge in line for node in edge}
    y = _heights(ranks, links, tall, gap, weight)
    for route in routes.values():
        _straighten(route[1:-1], ranks, y, tall, gap)
    top = min((y[p] - tall[p] / 2 for p in points), default=0.0)
    y = {point: value - top for point, value in y.items()}
    height = max((y[p] + tall[p] / 2 for p in points), default=0.0)
    return Columns(depth, y, routes, height)


def _routes(edges: Sequence[Edge], layer: Mapping[str, int]) -> dict[Edge, tuple[str, ...]]:
    routes = {}
    for source, target in edges:
        between = range(layer[source] + 1, layer[target])
        waypoints = (f"{source}\0{target}\0{place}" for place in between)
        routes[source, target] = (source, *waypoints, target)
    return routes


def _layer_of(point: str, layer: Mapping[str, int]) -> int:
    return layer[point] if point in layer else int(point.rpartition("\0")[2])


def _ordered(ranks: list[list[str]], links: Sequence[Edge]) -> list[list[str]]:
    before, after = _neighbours(links)
    best, fewest = ranks, _crossings(ranks, links)
    for sweep in range(SWEEPS):
        forward = sweep % 2 == 0
        near = before if forward else after
        ranks = [list(rank) for rank in ranks]
        for rank in ranks if forward else ranks[::-1]:
            place = {p: float(i) for r in ranks for i, p in enumerate(r)}
            rank.sort(key=lambda p: _mean([place[n] for n in near.get(p, [])], place[p]))
        crossings = _crossings(ranks, links)
        if crossings < fewest:
            best, fewest = ranks, crossings
    return best


def _neighbours(links: Sequence[Edge]) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    before: dict[str, list[str]] = {}
    after: dict[str, list[str]] = {}
    for source, target in links:
        before.setdefault(target, []).append(source)
        after.setdefault(source, []).append(target)
    return before, after


def _mean(values: Sequence[float], otherwise: float) -> float:
    return sum(values) / len(values) if values else otherwise


def _crossings(ranks: list[list[str]], links: Sequence[Edge]) -> int:
    place = {point: (i, j) for i, rank in enumerate(ranks) for j, point in enumerate(rank)}
    count = 0
    for (a, b), (c, d) in itertools.combinations(links, 2):
        if place[a][0] == place[c][0]:
            count += (place[a][1] - place[c][1]) * (place[b][1] - place[d][1]) < 0
    return count


def _heights(
    ranks: list[list[str]],
    links: Sequence[Edge],
    tall: Mapping[str, float],
    gap: float,
    weight: Mapping[str, float],
) -> dict[str, float]:
    """Middles of all points: the heavy ones at 0, the others near what they are linked to."""
    before, after = _neighbours(links)
    y = {p: 0.0 for rank in ranks for p in rank}
    for sweep in range(SWEEPS):
        for rank in ranks if sweep % 2 == 0 else ranks[::-1]:
            wished = {
                p: 0.0
                if weight[p] == HEAVY
                else _mean([y[n] for n in (*before.get(p, []), *after.get(p, []))], y[p])
                for p in rank
            }
            y |= _settled(rank, wished, tall, gap, weight)
    return y


def _settled(
    rank: Sequence[str],
    wished: Mapping[str, float],
    tall: Mapping[str, float],
    gap: float,
    weight: Mapping[str, float],
) -> dict[str, float]:
    """A layer as near to its wishes as order and distances allow; points that touch move as one."""
    offset = 0.0
    offsets = {}
    for before, point in zip([None, *rank], rank, strict=False):
        offset += (tall[before] + tall[point]) / 2 + gap if before is not None else 0.0
        offsets[point] = offset
    blocks: list[list[str]] = []

    def shift(block: Sequence[str]) -> float:
        wish = sum(weight[p] * (wished[p] - offsets[p]) for p in block)
        return wish / sum(weight[p] for p in block)

    for point in rank:
        blocks.append([point])
        while len(blocks) > 1 and shift(blocks[-2]) > shift(blocks[-1]):
            last = blocks.pop()
            blocks[-1].extend(last)
    return {point: offsets[point] + shift(block) for block in blocks for point in block}


def _straighten(
    waypoints: Sequence[str],
    ranks: list[list[str]],
    y: dict[str, float],
    tall: Mapping[str, float],
    gap: float,
) -> None:
    """Move the waypoints of an edge to the outermost of them, if there is room all the way."""
    if len(waypoints) < 2:
        return
    outermost = max((y[p] for p in waypoints), key=abs)
    moved = y | dict.fromkeys(waypoints, outermost)
    for rank in ranks:
        for above, below in itertools.pairwise(rank):
            if moved[below] - moved[above] < (tall[above] + tall[below]) / 2 + gap - 0.01:
                return
    y.update(moved)


# --- top to bottom ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Bus:
    """What leaves one node for rows further down, on a lane beside the nodes."""

    source: str
    targets: tuple[str, ...]
    lane: int
    """0 is the lane next to the nodes."""


@dataclass(frozen=True, slots=True)
class Tracks:
    """One node a row, all in a column."""

    order: tuple[str, ...]
    straight: tuple[Edge, ...]
    """Edges from one row to the next."""
    buses: tuple[Bus, ...]

    @property
    def num_lanes(self) -> int:
        """How many lanes stand beside the column."""
        return max((bus.lane for bus in self.buses), default=-1) + 1


def tracks(nodes: Sequence[str], edges: Sequence[Edge]) -> Tracks:
    """A drawing as narrow as a phone; short buses keep next to the nodes."""
    order = topological(nodes, edges)
    row = {node: i for i, node in enumerate(order)}
    straight = tuple(e for e in edges if row[e[1]] == row[e[0]] + 1)
    children = children_of(nodes, [e for e in edges if e not in straight])
    spans = {n: (row[n], max(row[c] for c in found)) for n, found in children.items() if found}
    taken: list[list[tuple[int, int]]] = []
    buses = []
    for node, (top, bottom) in sorted(spans.items(), key=lambda s: (s[1][1] - s[1][0], s[1])):
        free = (i for i, t in enumerate(taken) if all(bottom <= a or b <= top for a, b in t))
        lane = next(free, len(taken))
        if lane == len(taken):
            taken.append([])
        taken[lane].append((top, bottom))
        buses.append(Bus(node, tuple(sorted(children[node], key=row.__getitem__)), lane))
    return Tracks(tuple(order), straight, tuple(buses))
