"""The HTML page of a load test: the figures of each measurement, curves, errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from stages.benchmark.page import figure, table, whole_page
from trainyard.charts.line_chart import Axis, Series, line_chart
from trainyard.charts.markup import Markup, element
from trainyard.charts.numbers import Format, milliseconds, percent, three, whole
from trainyard.charts.points import Point
from trainyard.load_test.measurement import LoadTestResult, Measurement
from trainyard.load_test.metrics import LATENCIES, PERCENTILES, concurrency_steps

DEFINITIONS = {
    "ttft": ("Time to first token (TTFT)", "from sending to the first piece of text"),
    "tpot": ("Time per output token (TPOT)", "(E2EL - TTFT) / (tokens - 1) of a request"),
    "itl": ("Inter-token latency (ITL)", "between two pieces of text, of all requests"),
    "e2el": ("End-to-end latency (E2EL)", "from sending to the last piece of text"),
}

RATES = Axis("requests/s", lambda rate: f"{three(rate)} requests/s", three)
USERS = Axis("requests at a time", lambda users: f"{whole(users)} at a time", whole, is_log=True)
SECONDS = Axis("second", lambda second: f"{three(second)} s", three)
PERCENTILE = Axis("percentile", lambda p: f"p{p:g}", lambda p: f"p{p:g}")

MAX_PARTS = 100
"""Points of the curve of a distribution."""


def report_page(result: LoadTestResult, about: Mapping[str, Any]) -> str:
    """about: names and values of what was measured, and of how."""
    measured = result.measurements
    return whole_page(
        "Load test",
        _verdict(result, about),
        element("h2", "Measurements"),
        _measurements(measured),
        *(_curves(measured) if len(measured) > 1 else _one(measured[0])),
        *_errors(measured),
        element("h2", "What was measured"),
        table(("Option", "Value"), [(name, str(value)) for name, value in about.items()]),
    )


def verdict(result: LoadTestResult, attainment: float, goodput: Sequence[str]) -> str:
    """What a sweep found, in a sentence."""
    aim = f"{percent(attainment)} of requests within {', '.join(goodput)} (ms)"
    if result.highest_rate is None:
        assert result.failed_rate is not None
        return f"No rate has {aim}; {three(result.failed_rate)} requests/s was the lowest."
    found = f"{three(result.highest_rate)} requests/s is the highest rate that has {aim}"
    fastest = max(result.measurements, key=lambda one: one.request_rate or 0.0)
    if result.failed_rate is None and fastest.summary["max_concurrency"] == len(fastest.records):
        return (
            f"{found}, but all {len(fastest.records)} requests were under way at once, so a higher "
            "rate asks no more of the server: raise --num-requests."
        )
    if result.failed_rate is None:
        return f"{found}, and no higher one was measured: raise --sweep-max-probes."
    near = "" if result.is_narrow else "; --sweep-max-probes ended the search"
    return f"{found}; {three(result.failed_rate)} has not{near}."


def _verdict(result: LoadTestResult, about: Mapping[str, Any]) -> Markup | None:
    text = about.get("verdict")
    return None if text is None else element("p", element("b", text))


def _shown(value: float | None, form: Format) -> str:
    return "" if value is None else form(value)


def _measurements(measured: Sequence[Measurement]) -> Markup:
    rows = []
    for one in measured:
        found = one.summary
        latencies = [
            _shown(found[name] and found[name][which], milliseconds)
            for name in ("ttft", "tpot", "e2el")
            for which in ("p50", "p99")
        ]
        rows.append(
            (
                one.name,
                f"{found['num_completed']} / {found['num_failed']}",
                _shown(found["requests_per_second"], three),
                _shown(found["output_tokens_per_second"], three),
                *latencies,
                _shown(found["goodput"], three),
            )
        )
    heads = ("Requests sent", "Done / failed", "Req/s", "Out tok/s")
    names = ("TTFT p50", "TTFT p99", "TPOT p50", "TPOT p99", "E2EL p50", "E2EL p99", "Goodput/s")
    return table((*heads, *names), rows, 10)


def _latency_table(one: Measurement) -> Markup:
    rows = []
    for key in LATENCIES:
        found = one.summary[key]
        if found is not None:
            columns = ("mean", *(f"p{p}" for p in PERCENTILES), "max")
            rows.append((*DEFINITIONS[key], *(milliseconds(found[c]) for c in columns)))
    heads = ("Latency", "Definition", "Mean", *(f"p{p}" for p in PERCENTILES), "Max")
    return table(heads, rows, 6)


# --- curves over measurements -----------------------------------------------------------------


def _curves(measured: Sequence[Measurement]) -> list[Markup | None]:
    """Over the rate, or the concurrency; nothing for a measurement without either."""
    is_rate = measured[0].request_rate is not None
    axis = RATES if is_rate else USERS
    placed = [
        (at, one)
        for one in measured
        if (at := one.request_rate if is_rate else one.concurrency) is not None
    ]
    placed.sort(key=lambda pair: pair[0])

    def points(key: str, which: str | None = None) -> tuple[Point, ...]:
        found = [(at, one.summary[key]) for at, one in placed]
        return tuple((at, f[which] if which else f) for at, f in found if f is not None)

    def latency(key: str) -> Markup | None:
        series = [
            Series(name, points(key, name), css, dots=True)
            for name, css in (("p50", "a"), ("p90", "b"), ("p99", "c"))
        ]
        title = DEFINITIONS[key][0]
        chart = line_chart(title, series, milliseconds, from_zero=True, axis=axis)
        return figure(chart, f"{title} by {axis.name}, seconds")

    def rate(title: str, *keys: tuple[str, str, str]) -> Markup | None:
        series = [Series(name, points(key), css, dots=True) for key, name, css in keys]
        return figure(line_chart(title, series, three, from_zero=True, axis=axis), title)

    return [
        rate(f"Output tokens/s by {axis.name}", ("output_tokens_per_second", "output", "a")),
        rate(
            f"Requests/s done by {axis.name}",
            ("requests_per_second", "done", "a"),
            ("goodput", "good", "d"),
        ),
        *map(latency, ("ttft", "tpot", "e2el")),
    ]


# --- one measurement --------------------------------------------------------------------------


def _one(one: Measurement) -> list[Markup | None]:
    ok = [record for record in one.records if record.is_ok]
    by_time = sorted((record.sent_at, record.ttft) for record in ok)
    under_way = concurrency_steps(one.records)
    under_way_chart = line_chart(
        "Requests under way",
        [Series("under way", tuple((at, float(count)) for at, count in under_way), "a")],
        whole,
        from_zero=True,
        axis=SECONDS,
    )
    ttft = line_chart(
        "Time to first token",
        [Series("TTFT", tuple(by_time), "a", dots=len(by_time) < MAX_PARTS)],
        milliseconds,
        from_zero=True,
        axis=SECONDS,
    )
    distribution = line_chart(
        "Latencies",
        [
            Series("TTFT", _distribution([r.ttft for r in ok]), "a"),
            Series("E2EL", _distribution([r.e2el for r in ok]), "b"),
        ],
        milliseconds,
        from_zero=True,
        axis=PERCENTILE,
    )
    return [
        element("h2", "Latencies"),
        _latency_table(one),
        figure(distribution, "Latencies by percentile, seconds"),
        figure(under_way_chart, "Requests under way, by second"),
        figure(ttft, "Time to first token in seconds, by the second of sending"),
    ]


def _distribution(values: Sequence[float]) -> tuple[Point, ...]:
    if not values:
        return ()
    places = np.linspace(0, 100, min(len(values), MAX_PARTS) + 1)
    return tuple(zip(places.tolist(), np.percentile(values, places).tolist(), strict=True))


def _errors(measured: Sequence[Measurement]) -> list[Markup | None]:
    rows = [
        (one.name, text, count) for one in measured for text, count in one.summary["errors"].items()
    ]
    if not rows:
        return []
    return [element("h2", "Errors"), table(("Requests sent", "Error", "Requests"), rows, 1)]
