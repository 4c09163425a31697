"""The HTML page of a load test: the figures of each measurement, curves, errors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, pairwise
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


def _short(value: float) -> str:
    return f"{value:.4g}"


RATES = Axis("requests sent a second", lambda rate: f"{rate:.4g} requests/s", _short)
USERS = Axis("requests at a time", lambda users: f"{whole(users)} at a time", whole, is_log=True)
SECONDS = Axis("second", lambda second: f"{second:.4g} s", _short)
GOOD = ("goodput", "good", "d")
PERCENTILE = Axis("percentile", lambda p: f"p{p:g}", lambda p: f"p{p:g}")

MAX_PARTS = 100
"""Points of the curve of a distribution."""

WIDE_RATES = 8
"""A highest rate this many times the lowest is shown on a logarithmic axis."""


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
    if result.is_burst:
        count = len(result.measurements[-1].records)
        return (
            f"{found}, but all {count} requests were under way at once, so a higher rate asks no "
            "more of the server: raise --num-requests, or give --duration-seconds in its place."
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
    has_slo = any(one.summary["goodput"] is not None for one in measured)
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
                *([_shown(found["goodput"], three)] if has_slo else []),
            )
        )
    heads = ("Requests sent", "Done / failed", "Req/s", "Out tok/s")
    names = ["TTFT p50", "TTFT p99", "TPOT p50", "TPOT p99", "E2EL p50", "E2EL p99"]
    names += ["Goodput/s"] if has_slo else []
    return table((*heads, *names), rows, len(names) + 3)


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
    if is_rate and placed[-1][0] >= WIDE_RATES * placed[0][0]:
        axis = replace(axis, is_log=True)

    def found(key: str) -> list[tuple[float, Any]]:
        every = [(at, one.summary[key]) for at, one in placed]
        return [(at, value) for at, value in every if value is not None]

    def latency(key: str) -> Markup | None:
        series = [
            Series(name, _in_ms((at, f[name]) for at, f in found(key)), css, dots=True)
            for name, css in (("p50", "a"), ("p90", "b"), ("p99", "c"))
        ]
        title = f"{DEFINITIONS[key][0]}, ms, by {axis.name}"
        return figure(line_chart(title, series, _ms, from_zero=True, axis=axis), title)

    def rate(what: str, *keys: tuple[str, str, str]) -> Markup | None:
        series = [Series(name, tuple(found(key)), css, dots=True) for key, name, css in keys]
        title = f"{what} by {axis.name}"
        return figure(line_chart(title, series, three, from_zero=True, axis=axis), title)

    return [
        rate("Output tokens/s", ("output_tokens_per_second", "output", "a")),
        rate("Requests done a second", ("requests_per_second", "done", "a"), GOOD),
        *map(latency, ("ttft", "tpot", "e2el")),
    ]


def _in_ms(points: Iterable[Point]) -> tuple[Point, ...]:
    """Of points in seconds."""
    return tuple((at, 1e3 * seconds) for at, seconds in points)


def _ms(value: float) -> str:
    return milliseconds(value / 1e3)


# --- one measurement --------------------------------------------------------------------------


def _one(one: Measurement) -> list[Markup | None]:
    ok = [record for record in one.records if record.is_ok]
    by_time = _in_ms(sorted((record.sent_at, record.ttft) for record in ok))
    under_way_chart = line_chart(
        "Requests under way",
        [Series("under way", _staircase(concurrency_steps(one.records)), "a")],
        whole,
        from_zero=True,
        axis=SECONDS,
    )
    ttft = line_chart(
        "Time to first token",
        [Series("TTFT", by_time, "a", dots=len(by_time) < MAX_PARTS)],
        _ms,
        from_zero=True,
        axis=SECONDS,
    )
    distribution = line_chart(
        "Latencies",
        [
            Series("TTFT", _in_ms(_distribution([r.ttft for r in ok])), "a"),
            Series("E2EL", _in_ms(_distribution([r.e2el for r in ok])), "b"),
        ],
        _ms,
        from_zero=True,
        axis=PERCENTILE,
    )
    return [
        element("h2", "Latencies"),
        _latency_table(one),
        figure(distribution, "Latencies, ms, by percentile"),
        figure(under_way_chart, "Requests under way by second"),
        figure(ttft, "Time to first token, ms, by second of sending"),
    ]


def _staircase(steps: Sequence[tuple[float, int]]) -> tuple[Point, ...]:
    """Points of a count that stays until its next step."""
    corners = [
        [(at, float(count)), (after, float(count))] for (at, count), (after, _) in pairwise(steps)
    ]
    return tuple(chain(*corners, [(at, float(count)) for at, count in steps[-1:]]))


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
