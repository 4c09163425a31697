"""Line charts as SVG that stretch with the page while their type does not.

Positions are percentages; curves lie in a nested SVG without aspect ratio, their strokes do not
scale. A band around each point shows its values on hover or touch, without a script."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stages.report.formats import DOT, MINUS, is_number, scaled, whole
from stages.report.markup import Markup, el, join

Point = tuple[float, float]

MAX_POINTS = 400
"""Of a curve; more are thinned to the extremes of each bucket."""
MAX_BANDS = 120
MAX_ROWS = 40
GRID = 1000.0


@dataclass(frozen=True, slots=True)
class Series:
    """One curve of a chart."""

    name: str
    points: tuple[Point, ...]
    css: str
    """Class that colours it: a, b, c or d."""
    dots: bool = False
    """Mark each point; for the few and precious."""


@dataclass(frozen=True, slots=True)
class Scale:
    """The range of an axis and where its ticks lie."""

    low: float
    high: float
    ticks: tuple[float, ...]

    def at(self, value: float) -> float:
        """Position between 0 and 1."""
        return (value - self.low) / (self.high - self.low)


def finite(points: Sequence[tuple[float, float | None]]) -> tuple[Point, ...]:
    """The points that can be drawn."""
    return tuple((x, y) for x, y in points if y is not None and is_number(x) and is_number(y))


def thin(points: Sequence[Point], limit: int = MAX_POINTS) -> tuple[Point, ...]:
    """At most about `limit` points: the lowest and highest of each bucket, so that spikes stay."""
    if len(points) <= limit:
        return tuple(points)
    buckets = limit // 2
    kept = {0, len(points) - 1}
    for bucket in range(buckets):
        span = range(bucket * len(points) // buckets, (bucket + 1) * len(points) // buckets)
        kept.add(min(span, key=lambda i: points[i][1]))
        kept.add(max(span, key=lambda i: points[i][1]))
    return tuple(points[i] for i in sorted(kept))


def spaced(count: int, limit: int) -> list[int]:
    """At most `limit` indices from the first to the last."""
    if count <= limit:
        return list(range(count))
    return sorted({round(i * (count - 1) / (limit - 1)) for i in range(limit)})


# --- scales -----------------------------------------------------------------------------------


def nice_step(span: float, count: int) -> float:
    """The 1, 2 or 5 times a power of ten that cuts a span in about `count`."""
    raw = span / max(count, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    return next(m * power for m in (1.0, 2.0, 5.0, 10.0) if m * power >= raw * 0.75)


def value_scale(values: Sequence[float], count: int = 4, zero: bool = False) -> Scale:
    """An axis that holds all values with a little room, and ticks at round values."""
    low, high = min(values), max(values)
    if zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        room = abs(high) * 0.1 or 1.0
        low, high = low - room, high + room
    room = 0.06 * (high - low)
    low = low if zero and low == 0.0 else low - room
    high = high if zero and high == 0.0 else high + room
    return Scale(low, high, _ticks(low, high, nice_step(high - low, count)))


def _ticks(low: float, high: float, step: float) -> tuple[float, ...]:
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return tuple(i * step for i in range(first, last + 1))


def tick_labels(ticks: Sequence[float], value_format: Callable[[float], str]) -> list[str]:
    """The ticks with no more decimals than tell them apart; the format's own for small values."""
    if any(0 < abs(tick) < 0.01 for tick in ticks):
        return [value_format(tick) for tick in ticks]
    for digits in range(4):
        labels = [f"{tick:.{digits}f}".replace("-", MINUS) for tick in ticks]
        if all(abs(float(f"{tick:.{digits}f}") - tick) < 1e-9 for tick in ticks):
            break
    if any(abs(tick) >= 10000 for tick in ticks):
        return [scaled(tick).replace(".00", "").replace(".0", "") for tick in ticks]
    return labels


def step_scale(values: Sequence[float], count: int = 5) -> Scale:
    """An axis of steps: as wide as the data, ticks at round steps."""
    low, high = min(values), max(values)
    if low == high:
        return Scale(low - 1, high + 1, (low,))
    return Scale(low, high, _ticks(low, high, max(1.0, nice_step(high - low, count))))


# --- drawing ----------------------------------------------------------------------------------


def line_chart(
    ident: str,
    title: str,
    series: Sequence[Series],
    value_format: Callable[[float], str],
    *,
    css: str = "",
    zero: bool = False,
    note: str = "",
) -> Markup:
    """A figure with title, legend, curves by step, and its numbers behind a fold.

    Nothing at all when there is no point to draw."""
    series = [s for s in series if s.points]
    if not series:
        return Markup("")
    x = step_scale([p[0] for s in series for p in s.points])
    y = value_scale([p[1] for s in series for p in s.points], zero=zero)
    described = f"{title} by step. " + " ".join(_described(s, value_format) for s in series)
    picture = el(
        "svg",
        el("title", described, id=f"{ident}-title"),
        _grid(x, y, value_format),
        el(
            "svg",
            *[_curve(s, x, y) for s in series],
            viewBox=f"0 0 {GRID:.0f} {GRID:.0f}",
            preserveAspectRatio="none",
            width="100%",
            height="100%",
            overflow="visible",
        ),
        *_bands(series, x, value_format),
        role="img",
        aria_labelledby=f"{ident}-title",
    )
    caption = el(
        "figcaption",
        el("span", title, class_="name"),
        _legend(series) if len(series) > 1 else None,
        el("span", note, class_="note") if note else None,
    )
    plot = el("div", picture, class_="plot")
    return el("figure", caption, plot, _table(series, value_format), class_=f"chart {css}".strip())


def _described(series: Series, value_format: Callable[[float], str]) -> str:
    (first_x, first_y), (last_x, last_y) = series.points[0], series.points[-1]
    if len(series.points) == 1:
        return f"{series.name}: {value_format(first_y)} at step {whole(first_x)}."
    return (
        f"{series.name}: {value_format(first_y)} at step {whole(first_x)}, "
        f"{value_format(last_y)} at step {whole(last_x)}."
    )


def _percent(share: float) -> str:
    return f"{100 * share:.2f}".rstrip("0").rstrip(".") + "%"


def _grid(x: Scale, y: Scale, value_format: Callable[[float], str]) -> Markup:
    parts = [el("line", x1="0", x2="100%", y1="100%", y2="100%", class_="base")]
    for tick, label in zip(y.ticks, tick_labels(y.ticks, value_format), strict=True):
        at = _percent(1 - y.at(tick))
        if tick > y.low:
            parts.append(el("line", x1="0", x2="100%", y1=at, y2=at))
        parts.append(el("text", label, x="0", dx="-8", y=at, dy="4", class_="ytick"))
    for tick in x.ticks:
        place = x.at(tick)
        anchor = "end" if place > 0.97 else "start" if place < 0.02 else "middle"
        label = ("step " if tick == x.ticks[0] else "") + whole(tick)
        parts.append(el("text", label, x=_percent(place), y="100%", dy="18", text_anchor=anchor))
    return el("g", *parts, class_="axis")


def _curve(series: Series, x: Scale, y: Scale) -> Markup:
    places = [(GRID * x.at(px), GRID * (1 - y.at(py))) for px, py in thin(series.points)]
    path = "M" + "L".join(f"{px:.1f} {py:.1f}" for px, py in places)
    drawn = [el("path", d=path, class_=f"curve {series.css}")] if len(places) > 1 else []
    if series.dots or len(places) == 1:
        # A stroke of no length with round ends: a dot that stays round however the plot stretches.
        dots = "".join(f"M{px:.1f} {py:.1f}h0" for px, py in places)
        drawn.append(el("path", d=dots, class_=f"dots {series.css}"))
    return join(drawn)


def _bands(
    series: Sequence[Series], x: Scale, value_format: Callable[[float], str]
) -> list[Markup]:
    tables = [dict(s.points) for s in series]
    everywhere = sorted({px for table in tables for px in table})
    marks = [everywhere[i] for i in spaced(len(everywhere), MAX_BANDS)]
    places = [x.at(mark) for mark in marks]
    edges = [0.0, *((a + b) / 2 for a, b in itertools.pairwise(places)), 1.0]
    bands = []
    for mark, place, (left, right) in zip(marks, places, itertools.pairwise(edges), strict=True):
        read = [f"step {whole(mark)}"]
        for one, table in zip(series, tables, strict=True):
            if mark in table:
                name = f"{one.name} " if len(series) > 1 else ""
                read.append(name + value_format(table[mark]))
        text = f" {DOT} ".join(read)
        at = _percent(place)
        bands.append(
            el(
                "g",
                el("title", text),
                el("rect", x=_percent(left), width=_percent(right - left), height="100%"),
                el("line", x1=at, x2=at, y1="0", y2="100%"),
                el("text", text, x="100%", y="-10", text_anchor="end"),
                class_="band",
            )
        )
    return bands


def _legend(series: Sequence[Series]) -> Markup:
    keys = [el("span", s.name, class_=f"key {s.css}{' dotted' if s.dots else ''}") for s in series]
    return el("span", *keys, class_="legend")


def _table(series: Sequence[Series], value_format: Callable[[float], str]) -> Markup:
    tables = [dict(s.points) for s in series]
    everywhere = sorted({px for table in tables for px in table})
    rows = [everywhere[i] for i in spaced(len(everywhere), MAX_ROWS)]
    head = el("tr", el("th", "step", scope="col"), *[el("th", s.name, scope="col") for s in series])
    body = []
    for row in rows:
        values = [value_format(t[row]) if row in t else "" for t in tables]
        body.append(el("tr", el("td", whole(row)), *[el("td", value) for value in values]))
    of_all = "" if len(rows) == len(everywhere) else f" ({len(rows)} of {len(everywhere)} rows)"
    table = el("table", el("thead", head), el("tbody", *body), class_="numbers")
    return el(
        "details",
        el("summary", f"numbers{of_all}"),
        el("div", table, class_="scroll", tabindex="0", role="region", aria_label="numbers"),
    )
