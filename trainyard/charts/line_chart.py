"""Line charts as SVG, by step or over another axis. A band around each point shows its values on
hover, without a script.

Positions are percentages of the surrounding SVG, so a chart stretches and its type does not.
The curves are in a nested SVG without aspect ratio, and their strokes do not scale.
Style sheets color the classes `a` to `d` of the series."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from trainyard.charts.markup import Markup, element, join
from trainyard.charts.numbers import DOT, MINUS, Format, scaled, whole
from trainyard.charts.points import Point

MAX_POINTS = 400
"""Points of a curve; `thin` keeps the extremes of each bucket of a longer one."""
MAX_BANDS = 120
MAX_ROWS = 40
GRID = 1000


@dataclass(frozen=True, slots=True)
class Series:
    """One curve of a chart."""

    name: str
    points: Sequence[Point]
    """In the order of the axis."""
    css: str
    """Class that colors it: a, b, c or d."""
    dots: bool = False
    """Mark each point."""


@dataclass(frozen=True, slots=True)
class Scale:
    """The range of an axis and its ticks."""

    low: float
    high: float
    ticks: tuple[float, ...]
    is_log: bool = False
    """Equal ratios are equal distances; both ends are above 0."""

    def at(self, value: float) -> float:
        """Position between 0 and 1."""
        if self.is_log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


@dataclass(frozen=True, slots=True)
class Axis:
    """What runs from left to right."""

    name: str
    """In a sentence, and above a column."""
    shown: Format
    """A value in full."""
    tick: Format
    """A value at a tick after the first, which is shown in full."""
    is_log: bool = False


STEPS = Axis("step", lambda step: f"step {whole(step)}", whole)


@dataclass(frozen=True, slots=True, kw_only=True)
class LineChart:
    """Curves by step or over another axis, with a title; made by `line_chart`."""

    title: str
    note: str
    series: tuple[Series, ...]
    value_format: Format
    x: Scale
    y: Scale
    axis: Axis = STEPS

    @property
    def description(self) -> str:
        """The first and last value of each curve, for readers who do not see it."""
        parts = [f"{self.title} by {self.axis.name}."]
        for one in self.series:
            ends = dict.fromkeys((one.points[0], one.points[-1]))
            shown = [f"{self.value_format(y)} at {self.axis.shown(x)}" for x, y in ends]
            parts.append(f"{one.name}: {', '.join(shown)}.")
        return " ".join(parts)

    def rows(self) -> tuple[list[list[str]], int]:
        """At most MAX_ROWS rows of a table (place on the axis, value of each curve), and how many
        there are."""
        steps, tables, total = self._spaced(MAX_ROWS)
        rows = []
        for step in steps:
            values = [self.value_format(t[step]) if step in t else "" for t in tables]
            rows.append([self.axis.tick(step), *values])
        return rows, total

    def plot(self, has_bands: bool = True) -> Markup:
        """Axes, curves and bands: the content of an SVG of any size."""
        curves = element(
            "svg",
            *[self._curve(one) for one in self.series],
            viewBox=f"0 0 {GRID} {GRID}",
            preserveAspectRatio="none",
            width="100%",
            height="100%",
            overflow="visible",
        )
        return join([self._axes(), curves, *(self._bands() if has_bands else [])])

    def inset(self, x: int, y: int, width: int, height: int) -> Markup:
        """The plot at a place of another picture, without what a pointer shows."""
        plot = self.plot(has_bands=False)
        return element("svg", plot, x=x, y=y, width=width, height=height, overflow="visible")

    def _spaced(self, limit: int) -> tuple[list[float], list[dict[float, float]], int]:
        """At most `limit` steps, the values of each curve there, and the number of all steps."""
        total = sum(1 for _ in self._steps())
        places = set(spaced(total, limit))
        chosen = [step for place, step in enumerate(self._steps()) if place in places]
        wanted = set(chosen)
        tables = [{x: y for x, y in one.points if x in wanted} for one in self.series]
        return chosen, tables, total

    def _steps(self) -> Iterator[float]:
        """The steps of all curves in their order, each once; never all in memory."""
        every = heapq.merge(*((step for step, _ in one.points) for one in self.series))
        return (step for step, _ in itertools.groupby(every))

    def _axes(self) -> Markup:
        parts = [element("line", x1="0", x2="100%", y1="100%", y2="100%", class_="base")]
        labels = tick_labels(self.y.ticks, self.value_format)
        for tick, label in zip(self.y.ticks, labels, strict=True):
            y = _percent(1 - self.y.at(tick))
            if tick > self.y.low:
                parts.append(element("line", x1="0", x2="100%", y1=y, y2=y))
            parts.append(element("text", label, x="0", dx="-8", y=y, dy="4", class_="ytick"))
        for tick in self.x.ticks:
            at = self.x.at(tick)
            anchor = "end" if at > 0.97 else "start" if at < 0.02 else "middle"
            label = (self.axis.shown if tick == self.x.ticks[0] else self.axis.tick)(tick)
            parts.append(
                element("text", label, x=_percent(at), y="100%", dy="18", text_anchor=anchor)
            )
        return element("g", *parts, class_="axis")

    def _curve(self, series: Series) -> Markup:
        points = [(GRID * self.x.at(x), GRID * (1 - self.y.at(y))) for x, y in thin(series.points)]
        parts = []
        if len(points) > 1:
            path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
            parts.append(element("path", d=path, class_=f"curve {series.css}"))
        if series.dots or len(points) == 1:
            # A stroke of no length with round ends stays a round dot in a stretched plot.
            dots = "".join(f"M{x:.1f} {y:.1f}h0" for x, y in points)
            parts.append(element("path", d=dots, class_=f"dots {series.css}"))
        return join(parts)

    def _bands(self) -> list[Markup]:
        marks, tables, _ = self._spaced(MAX_BANDS)
        places = [self.x.at(mark) for mark in marks]
        edges = [0.0, *((a + b) / 2 for a, b in itertools.pairwise(places)), 1.0]
        bands = []
        for mark, place, left, right in zip(marks, places, edges, edges[1:], strict=False):
            values = [
                (f"{one.name} " if len(tables) > 1 else "") + self.value_format(table[mark])
                for one, table in zip(self.series, tables, strict=True)
                if mark in table
            ]
            text, at = f" {DOT} ".join([self.axis.shown(mark), *values]), _percent(place)
            bands.append(
                element(
                    "g",
                    element("title", text),
                    element("rect", x=_percent(left), width=_percent(right - left), height="100%"),
                    element("line", x1=at, x2=at, y1="0", y2="100%"),
                    element("text", text, x="100%", y="-10", text_anchor="end"),
                    class_="band",
                )
            )
        return bands


def line_chart(
    title: str,
    series: Sequence[Series],
    value_format: Format,
    *,
    from_zero: bool = False,
    note: str = "",
    axis: Axis = STEPS,
) -> LineChart | None:
    """A chart of the series that have points; None when no series has any."""
    series = tuple(one for one in series if one.points)
    if not series:
        return None
    return LineChart(
        title=title,
        note=note,
        series=series,
        value_format=value_format,
        x=(log_scale if axis.is_log else step_scale)(
            min(one.points[0][0] for one in series), max(one.points[-1][0] for one in series)
        ),
        y=value_scale(
            min(y for one in series for _, y in one.points),
            max(y for one in series for _, y in one.points),
            from_zero,
        ),
        axis=axis,
    )


def thin(points: Sequence[Point], limit: int = MAX_POINTS) -> tuple[Point, ...]:
    """About `limit` points: the lowest and highest of each bucket, so that spikes stay."""
    if len(points) <= limit:
        return tuple(points)
    buckets = limit // 2
    kept, rest = {0, len(points) - 1}, iter(points)
    for bucket in range(buckets):
        begin, end = (at * len(points) // buckets for at in (bucket, bucket + 1))
        values = [value for _, value in itertools.islice(rest, end - begin)]
        kept |= {begin + values.index(extreme(values)) for extreme in (min, max)}
    return tuple(points[i] for i in sorted(kept))


def spaced(count: int, limit: int) -> list[int]:
    """At most `limit` indices from the first to the last."""
    if count <= limit:
        return list(range(count))
    return sorted({round(i * (count - 1) / (limit - 1)) for i in range(limit)})


# --- scales -----------------------------------------------------------------------------------


def value_scale(low: float, high: float, from_zero: bool = False) -> Scale:
    """An axis that holds the values with some room, and about four ticks at round values."""
    if from_zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        room = abs(high) * 0.1 or 1.0
        low, high = low - room, high + room
    room = 0.06 * (high - low)
    low = low if from_zero and low == 0.0 else low - room
    high = high if from_zero and high == 0.0 else high + room
    return Scale(low, high, _ticks(low, high, _nice_step((high - low) / 4)))


def step_scale(low: float, high: float) -> Scale:
    """An axis of steps: as wide as the data, about five ticks at round steps."""
    if low == high:
        return Scale(low - 1, high + 1, (low,))
    return Scale(low, high, _ticks(low, high, max(1.0, _nice_step((high - low) / 5))))


def log_scale(low: float, high: float) -> Scale:
    """An axis of equal ratios: as wide as the data, which is above 0; ticks at powers of ten, or at
    1, 2 and 5 times them where there are fewer than three."""
    if low == high:
        return Scale(low / 2, high * 2, (low,), is_log=True)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in ((1.0,), (1.0, 2.0, 5.0)):
        every = (m * 10.0**power for power in powers for m in steps)
        ticks = tuple(tick for tick in every if low * (1 - 1e-9) <= tick <= high * (1 + 1e-9))
        if len(ticks) >= 3:
            break
    return Scale(low, high, ticks or (low, high), is_log=True)


def _nice_step(raw: float) -> float:
    """1, 2 or 5 times a power of ten, close to `raw`."""
    power = 10.0 ** math.floor(math.log10(raw))
    return next(m * power for m in (1.0, 2.0, 5.0, 10.0) if m * power >= raw * 0.75)


def _ticks(low: float, high: float, step: float) -> tuple[float, ...]:
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return tuple(i * step for i in range(first, last + 1))


def tick_labels(ticks: Sequence[float], value_format: Format) -> list[str]:
    """Labels with as few decimals as tell the ticks apart; small values keep their own format."""
    if any(0 < abs(tick) < 0.01 for tick in ticks):
        return [value_format(tick) for tick in ticks]
    if any(abs(tick) >= 10000 for tick in ticks):
        return [scaled(tick).replace(".00", "").replace(".0", "") for tick in ticks]
    digits = next(d for d in range(4) if d == 3 or all(abs(round(t, d) - t) < 1e-9 for t in ticks))
    return [f"{tick:.{digits}f}".replace("-", MINUS) for tick in ticks]


def _percent(share: float) -> str:
    return f"{100 * share:.2f}".rstrip("0").rstrip(".") + "%"
