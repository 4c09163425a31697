"""The HTML page of a benchmark: the figures, the time of every token, the requests. One file that
loads nothing."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from stages.benchmark.page import figure, table, whole_page
from trainyard.charts.line_chart import Axis, Series, line_chart
from trainyard.charts.markup import Markup, element
from trainyard.charts.numbers import milliseconds, rate, size, whole

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
    return whole_page(
        f"Inference benchmark, step {timings['step']}",
        _figures(timings),
        element("h2", "Latencies"),
        _latencies(timings),
        _chart(timings["requests"]),
        element("h2", "Requests"),
        _requests(timings["requests"], generations["requests"]),
    )


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
    return table(("Figure", "Value"), rows, 1)


def _latencies(timings: Mapping[str, Any]) -> Markup:
    rows = []
    for key, (name, meaning) in DEFINITIONS.items():
        found = timings[key]
        if found is not None:
            values = [milliseconds(found[which]) for which in ("mean", "median", "p99")]
            rows.append((name, meaning, *values))
    return table(("Latency", "Definition", "Mean", "Median", "p99"), rows, 3)


def _chart(requests: Sequence[Mapping[str, Any]]) -> Markup | None:
    """Median time of the second token, the third, ..."""
    longest = max(len(request["tpot"]) for request in requests)
    points = tuple(
        (float(i + 1), statistics.median(r["tpot"][i] for r in requests if len(r["tpot"]) > i))
        for i in range(1, longest)
    )
    series = Series("median", points, "a")
    chart = line_chart("Time of each token", (series,), milliseconds, from_zero=True, axis=TOKENS)
    return figure(chart, "Time of each token, median")


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
    return table(("", "Prompt", "Output", "Tokens", "Latency"), rows, 2)
