"""Pictures on Prefect's pages: standalone SVG files, passed as data URLs if no web server has the
files of a run."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

from stages.report.lineage import Ancestry, Lineage
from stages.report.lineage_picture import wide
from stages.report.run_lines import parse_lines
from trainyard.charts.line_chart import Series, line_chart
from trainyard.charts.markdown import code, escape
from trainyard.charts.markup import Markup, element
from trainyard.charts.numbers import duration, fixed, size
from trainyard.charts.points import Points

SVG = "http://www.w3.org/2000/svg"
WIDTH, HEIGHT = 860, 360
LEFT, RIGHT, TOP, BOTTOM = 62, 20, 48, 40

STYLE = """
svg { background: #faf9f6; }
text { font: 12px system-ui, sans-serif; fill: #5b6069; }
.name { font-size: 12.5px; font-weight: 650; fill: #1b1d21; } .title { font-size: 14px; }
.digest { font: 11px ui-monospace, Menlo, Consolas, monospace; fill: #1b1d21; }
.rail { fill: none; stroke: #a9a59b; stroke-width: 1.75; }
.rail.main { stroke: #1b1d21; stroke-width: 3; }
.box { fill: #fff; stroke: #d4d0c8; stroke-width: 1.25; }
.source .box { stroke-dasharray: 4 4; } .destination .box { stroke: #b8460e; stroke-width: 2; }
.mark { fill: #a9a59b; } .data .mark { fill: #1d5fa8; } .model .mark { fill: #b8460e; }
.measure .mark { fill: #0d7268; }
.axis line { stroke: #ebe8e2; } .axis line.base { stroke: #a9a59b; } .ytick { text-anchor: end; }
.curve, .dots { fill: none; stroke-linecap: round; stroke-linejoin: round;
  vector-effect: non-scaling-stroke; }
.curve { stroke-width: 2; } .dots { stroke-width: 7; }
.curve.a, .dots.a { stroke: #1d5fa8; } .curve.b, .dots.b { stroke: #b8460e; }
text.a { fill: #1d5fa8; } text.b { fill: #b8460e; }
"""


def data_url(svg: str) -> str:
    """The picture as a URL."""
    return "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode()


def _losses(step: dict[str, Any]) -> tuple[int, tuple[float | None, float | None]]:
    return int(step["step"]), (step.get("lm_loss"), step.get("validation_loss"))


def loss_curve(ledger: bytes, url: str, title: str) -> str | None:
    """Training and validation loss by step, from a ledger; None without a loss. url: of the ledger,
    for errors.

    Raises ArtifactError for a line that is no step."""
    training, validation = Points(), Points()
    for step, (loss, validation_loss) in parse_lines(ledger.splitlines(), url, "step", _losses):
        training.add(step, loss)
        validation.add(step, validation_loss)
    curves = [Series("training", training, "a"), Series("validation", validation, "b", dots=True)]
    chart = line_chart(title, curves, fixed(3))
    if chart is None:
        return None
    legend = [
        element(
            "text",
            f"{one.name} {fixed(3)(one.points[-1][1])}",
            x=WIDTH - RIGHT - 150 * number,
            y=26,
            text_anchor="end",
            class_=one.css,
        )
        for number, one in enumerate(chart.series)
    ]
    plot = chart.inset(LEFT, TOP, WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM)
    return element(
        "svg",
        element("style", Markup(STYLE)),
        element("text", title, x=LEFT, y=26, class_="name title"),
        *legend,
        plot,
        xmlns=SVG,
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        width=WIDTH,
        height=HEIGHT,
    )


def read_lineage(urls: Sequence[str], destination: str) -> Lineage:
    """The lineage of the artifacts at these URLs, by their manifests."""
    ancestry = Ancestry()
    ancestry.look_ahead([*urls, destination])
    keys = {url: ancestry.add(url) for url in (*urls, destination)}
    return ancestry.lineage(keys[destination])


def lineage_picture(lineage: Lineage) -> str:
    """Artifacts, and the edges between them."""
    return wide(lineage, style=STYLE, xmlns=SVG)


def lineage_page(lineage: Lineage) -> str:
    """Markdown: the picture, every artifact in a table as narrow as Prefect's pages are, and where
    each lies."""
    lines = [
        f"![What this run was made of]({data_url(lineage_picture(lineage))})",
        "",
        "| artifact | digest | size | made in | from |",
        "| --- | --- | ---: | ---: | --- |",
    ]
    for artifact in lineage.artifacts:
        cells = (
            escape(artifact.long_label),
            code(artifact.digest[:12]),
            "" if artifact.size_bytes is None else size(artifact.size_bytes),
            "" if artifact.seconds is None else duration(artifact.seconds),
            ", ".join(escape(origin.long_label) for origin in lineage.parents(artifact)),
        )
        lines.append("| " + " | ".join(cells) + " |")
    lines.append("")
    lines += [f"- {escape(one.long_label)}: {code(one.key)}" for one in lineage.artifacts]
    return "\n".join(lines) + "\n"
