"""Pictures for Prefect's pages, each whole in itself: SVG, handed over as a data URL, so that a
page needs no server of files beside Prefect's."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Sequence
from typing import Any

from stages.report import lineage as drawing
from stages.report.ancestry import Ancestry
from stages.report.charts import (
    Point,
    Scale,
    finite,
    step_scale,
    thin,
    tick_labels,
    value_scale,
)
from stages.report.facts import Artifact, Lineage
from stages.report.formats import duration, fixed, size, whole
from stages.report.markup import Markup, el

WIDTH, HEIGHT = 860, 360
LEFT, RIGHT, TOP, BOTTOM = 62, 20, 48, 40

COLOURS = {"training": "#1d5fa8", "validation": "#b8460e"}

STYLE = """
text { font: 12px system-ui, sans-serif; fill: #5b6069; }
.name { font-size: 12.5px; font-weight: 650; fill: #1b1d21; }
.digest { font: 11px ui-monospace, Menlo, Consolas, monospace; fill: #1b1d21; }
.rail { fill: none; stroke: #a9a59b; stroke-width: 1.75; }
.rail.main { stroke: #1b1d21; stroke-width: 3; }
.box { fill: #fff; stroke: #d4d0c8; stroke-width: 1.25; }
.source .box { stroke-dasharray: 4 4; } .destination .box { stroke: #b8460e; stroke-width: 2; }
.mark { fill: #a9a59b; } .data .mark { fill: #1d5fa8; } .model .mark { fill: #b8460e; }
.measure .mark { fill: #0d7268; }
.grid { stroke: #ebe8e2; } .base { stroke: #a9a59b; }
"""
PAPER = "#faf9f6"


def data_url(svg: str) -> str:
    """The URL that is the picture."""
    return "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode()


# --- the loss -----------------------------------------------------------------------------------


def loss_curve(ledger: Iterable[bytes], title: str) -> str | None:
    """The training and the validation loss by step, from the lines of a ledger; None of nothing."""
    steps = [json.loads(line) for line in ledger if line.strip()]
    names = {"training": "lm_loss", "validation": "validation_loss"}
    curves = {
        name: finite([(step["step"], step.get(key)) for step in steps])
        for name, key in names.items()
    }
    curves = {name: points for name, points in curves.items() if points}
    if not curves:
        return None
    x = step_scale([p[0] for points in curves.values() for p in points])
    y = value_scale([p[1] for points in curves.values() for p in points])
    return el(
        "svg",
        el("style", Markup(STYLE)),
        el("rect", width=WIDTH, height=HEIGHT, fill=PAPER),
        el("text", title, x=LEFT, y=26, class_="name", style="font-size:14px"),
        *_legend(curves),
        *_grid(x, y),
        *[_curve(name, points, x, y) for name, points in curves.items()],
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        width=WIDTH,
        height=HEIGHT,
    )


def _legend(curves: dict[str, tuple[Point, ...]]) -> list[Markup]:
    texts = [f"{name} {fixed(3)(points[-1][1])}" for name, points in curves.items()]
    places = range(WIDTH - RIGHT, 0, -150)
    return [
        el("text", text, x=place, y=26, text_anchor="end", style=f"fill:{COLOURS[name]}")
        for name, text, place in zip(curves, texts, places, strict=False)
    ]


def _at(x: Scale, y: Scale, point: Point) -> Point:
    across, up = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    return LEFT + across * x.at(point[0]), HEIGHT - BOTTOM - up * y.at(point[1])


def _grid(x: Scale, y: Scale) -> list[Markup]:
    parts = []
    for tick, label in zip(y.ticks, tick_labels(y.ticks, fixed(3)), strict=True):
        _, at = _at(x, y, (x.low, tick))
        parts.append(el("line", x1=LEFT, x2=WIDTH - RIGHT, y1=at, y2=at, class_="grid"))
        parts.append(el("text", label, x=LEFT - 8, y=at + 4, text_anchor="end"))
    foot = HEIGHT - BOTTOM
    parts.append(el("line", x1=LEFT, x2=WIDTH - RIGHT, y1=foot, y2=foot, class_="base"))
    for tick in x.ticks:
        across, _ = _at(x, y, (tick, y.low))
        label = ("step " if tick == x.ticks[0] else "") + whole(tick)
        parts.append(el("text", label, x=across, y=foot + 20, text_anchor="middle"))
    return parts


def _curve(name: str, points: Sequence[Point], x: Scale, y: Scale) -> Markup:
    places = [_at(x, y, point) for point in thin(points)]
    path = "M" + "L".join(f"{across:.1f} {up:.1f}" for across, up in places)
    dots = "".join(f"M{across:.1f} {up:.1f}h0" for across, up in places)
    few = name == "validation" or len(places) == 1
    return el(
        "g",
        el("path", d=path, stroke_width=2),
        el("path", d=dots, stroke_width=7) if few else None,
        fill="none",
        stroke=COLOURS[name],
        stroke_linecap="round",
        stroke_linejoin="round",
    )


# --- where it came from -------------------------------------------------------------------------


def read_lineage(urls: Sequence[str], destination: str) -> Lineage:
    """What the artifacts at these URLs were made of, by their manifests."""
    ancestry = Ancestry()
    keys = {url: ancestry.add(url) for url in (*urls, destination)}
    return ancestry.lineage(keys[destination])


def lineage_picture(lineage: Lineage) -> str:
    """Artifacts, and which went into which."""
    linked = {key for edge in lineage.edges for key in edge} | {lineage.destination}
    nodes = [artifact for artifact in lineage.artifacts if artifact.key in linked]
    svg = drawing.wide(nodes, lineage.edges, lineage.destination, "")
    head = '<svg xmlns="http://www.w3.org/2000/svg"'
    ground = f'<rect x="-9999" y="-9999" width="99999" height="99999" fill="{PAPER}"/>'
    first, rest = svg.removeprefix("<svg").split(">", 1)
    return f"{head}{first}><style>{STYLE}</style>{ground}{rest}"


def lineage_page(lineage: Lineage) -> str:
    """Markdown: the picture, and every artifact in a table."""
    lines = [
        f"![What this run was made of]({data_url(lineage_picture(lineage))})",
        "",
        "| artifact | digest | size | made in | where | from |",
        "| --- | --- | ---: | ---: | --- | --- |",
    ]
    labels = {artifact.key: artifact.long_label for artifact in lineage.artifacts}
    for artifact in lineage.artifacts:
        came = [labels[a] for a, b in lineage.edges if b == artifact.key and a in labels]
        lines.append(_artifact_line(artifact, came))
    return "\n".join(lines) + "\n"


def _artifact_line(artifact: Artifact, came: Sequence[str]) -> str:
    cells: tuple[Any, ...] = (
        artifact.long_label,
        f"`{artifact.digest[:16]}`" if artifact.digest else "",
        "" if artifact.size_bytes is None else size(artifact.size_bytes),
        "" if artifact.seconds is None else duration(artifact.seconds),
        f"`{artifact.key}`",
        ", ".join(came),
    )
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"
