"""The HTML page of a benchmark: the figures, the time of every token, the requests. One file that
loads nothing."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from trainyard.charts.line_chart import Axis, Series, line_chart
from trainyard.charts.markup import Markup, element, join
from trainyard.charts.numbers import milliseconds, rate, size, whole

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 960px; margin: 2rem auto; padding: 0 1rem;
  color: #1f2328; } h1 { font-size: 22px; } h2 { font-size: 17px; margin-top: 2rem; }
table { border-collapse: collapse; width: 100%; }
td, th { text-align: left; padding: 4px 12px 4px 0;
  border-bottom: 1px solid #d8dde3; vertical-align: top; } td.n, th.n { text-align: right; }
.plot { margin: 12px 12px 40px 72px; height: 260px; } .plot > svg { width: 100%; height: 100%;
  overflow: visible; } .axis line { stroke: #d8dde3; }
.axis text { font-size: 12px; fill: #59636e; }
.ytick { text-anchor: end; } .curve { fill: none; stroke-width: 2; vector-effect:
  non-scaling-stroke; } .curve.a { stroke: #1f6feb; } pre { white-space: pre-wrap; margin: 0; }
"""

TOKENS = Axis("token", lambda token: f"token {whole(token)}", whole)

DEFINITIONS = {
    "time_to_first_token": ("Time to first token", "from the start of a batch to its first token"),
    "inter_token_latency": ("Inter-token latency", "between two tokens of a request, all pooled"),
    "time_per_output_token": (
        "Time per output token",
        "of a request: (latency - time to first token) / (tokens - 1)",
    ),
    "end_to_end_latency": ("End-to-end latency", "of a request, until its own last token"),
}


def report_page(timings: Mapping[str, Any], generations: Mapping[str, Any]) -> str:
    """The page of the two documents."""
    body = element(
        "body",
        element("h1", f"Inference benchmark, step {timings['step']}"),
        _figures(timings),
        element("h2", "Latencies"),
        _latencies(timings),
        _chart(timings["requests"]),
        element("h2", "Requests"),
        _requests(timings["requests"], generations["requests"]),
    )
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("title", "Inference benchmark"),
        element("style", Markup(STYLE)),
    )
    return f"<!doctype html>\n{element('html', head, body, lang='en')}\n"


def _table(heads: Sequence[str], rows: Sequence[Sequence[Any]], numbers: int = 0) -> Markup:
    """numbers: of the last columns, which are aligned to the right."""

    def cells(kind: str, row: Sequence[Any]) -> Markup:
        first = len(row) - numbers
        return join(element(kind, x, class_="n" if i >= first else None) for i, x in enumerate(row))

    lines = [element("tr", cells("td", row)) for row in rows]
    return element("table", element("tr", cells("th", heads)), *lines)


def _figures(timings: Mapping[str, Any]) -> Markup:
    rows = [
        ("Output tokens / second", rate(timings["tokens_per_second"])),
        ("Latency per output token", milliseconds(timings["latency_per_output_token"])),
        ("Requests, output tokens", f"{timings['num_requests']}, {timings['num_output_tokens']}"),
        ("Engine, CUDA graphs", f"{timings['engine_type']}, {timings['cuda_graph_impl']}"),
        ("Device", timings["device"]),
        ("Keys and values", size(timings["kv_cache_bytes"])),
        ("Peak memory", size(timings["peak_memory_bytes"])),
    ]
    return _table(("Figure", "Value"), rows, 1)


def _latencies(timings: Mapping[str, Any]) -> Markup:
    rows = []
    for key, (name, meaning) in DEFINITIONS.items():
        found = timings[key]
        if found is not None:
            values = [milliseconds(found[which]) for which in ("mean", "median", "p99")]
            rows.append((name, meaning, *values))
    return _table(("Latency", "Definition", "Mean", "Median", "p99"), rows, 3)


def _chart(requests: Sequence[Mapping[str, Any]]) -> Markup | None:
    """Median time of the second token, the third, ..."""
    longest = max(len(request["tpot"]) for request in requests)
    points = tuple(
        (float(i + 1), statistics.median(r["tpot"][i] for r in requests if len(r["tpot"]) > i))
        for i in range(1, longest)
    )
    series = Series("median", points, "a")
    chart = line_chart("Time of each token", (series,), milliseconds, from_zero=True, axis=TOKENS)
    if chart is None:
        return None
    svg = element("svg", element("title", chart.description), chart.plot(), role="img")
    return join((element("h2", "Time of each token, median"), element("div", svg, class_="plot")))


def _requests(
    requests: Sequence[Mapping[str, Any]], generations: Sequence[Mapping[str, Any]]
) -> Markup:
    """The first repetition."""
    rows = [
        (
            timing["id"],
            element("pre", made["prompt"]),
            element("pre", made["generated_output"]),
            timing["num_output_tokens"],
            milliseconds(timing["latency"]),
        )
        for timing, made in zip(requests, generations, strict=False)
    ]
    return _table(("", "Prompt", "Output", "Tokens", "Latency"), rows, 2)
