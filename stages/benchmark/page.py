"""What the HTML pages of benchmarks share. One file that loads nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainyard.charts.line_chart import LineChart
from trainyard.charts.markup import Child, Markup, element, join

STYLE = """
:root { color-scheme: light dark; --ink: #1f2328; --soft: #59636e; --line: #d8dde3;
  --paper: #ffffff; --a: #1f6feb; --b: #bf5700; --c: #8250df; --d: #1a7f37; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --soft: #9aa4ae; --line: #30363d;
  --paper: #0d1117; --a: #58a6ff; --b: #f0883e; --c: #bc8cff; --d: #3fb950; } }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 960px; margin: 2rem auto; padding: 0 1rem;
  color: var(--ink); background: var(--paper); }
h1 { font-size: 22px; } h2 { font-size: 17px; margin-top: 2rem; } .note { color: var(--soft); }
.wide { overflow-x: auto; font-size: 13px; } table { border-collapse: collapse; width: 100%; }
td, th { text-align: left; padding: 4px 8px 4px 0;
  border-bottom: 1px solid var(--line); vertical-align: top; }
td.n, th.n { text-align: right; white-space: nowrap; }
.plot { margin: 34px 12px 40px 72px; height: 260px; } .plot > svg { width: 100%; height: 100%;
  overflow: visible; } .axis line { stroke: var(--line); }
.axis text { font-size: 12px; fill: var(--soft); } .ytick { text-anchor: end; }
.legend span { margin-right: 16px; color: var(--soft); } .key { font-weight: 700; }
.key.a { color: var(--a); } .key.b { color: var(--b); } .key.c { color: var(--c); }
.key.d { color: var(--d); }
.curve { fill: none; stroke-width: 2; vector-effect: non-scaling-stroke; }
.dots { fill: none; stroke-width: 7; stroke-linecap: round; vector-effect: non-scaling-stroke; }
.curve.a, .dots.a { stroke: var(--a); } .curve.b, .dots.b { stroke: var(--b); }
.curve.c, .dots.c { stroke: var(--c); } .curve.d, .dots.d { stroke: var(--d); }
.band rect { fill: transparent; } .band line { stroke: var(--ink); opacity: 0; }
.band text { font-size: 13px; fill: var(--ink); opacity: 0; }
.band:hover line { opacity: .35; } .band:hover text { opacity: 1; }
pre { white-space: pre-wrap; margin: 0; }
"""


def whole_page(title: str, *parts: Child) -> str:
    """A page of these parts."""
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", title),
        element("style", Markup(STYLE)),
    )
    body = element("body", element("h1", title), *parts)
    return f"<!doctype html>\n{element('html', head, body, lang='en')}\n"


def table(heads: Sequence[str], rows: Sequence[Sequence[Any]], numbers: int = 0) -> Markup:
    """numbers: of the last columns, which are aligned to the right."""

    def cells(kind: str, row: Sequence[Any]) -> Markup:
        first = len(row) - numbers
        return join(element(kind, x, class_="n" if i >= first else None) for i, x in enumerate(row))

    lines = [element("tr", cells("td", row)) for row in rows]
    whole = element("table", element("tr", cells("th", heads)), *lines)
    return element("div", whole, class_="wide")


def figure(chart: LineChart | None, title: str) -> Markup | None:
    """A chart under its heading, with the names of its curves if it has several."""
    if chart is None:
        return None
    legend = None
    if len(chart.series) > 1:
        names = [
            element("span", element("b", "\u2014 ", class_=f"key {one.css}"), one.name)
            for one in chart.series
        ]
        legend = element("div", *names, class_="legend")
    svg = element("svg", element("title", chart.description), chart.plot(), role="img")
    return join((element("h2", title), legend, element("div", svg, class_="plot")))
