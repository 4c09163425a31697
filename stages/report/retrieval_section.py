"""The section of the run card about what a Retro retrieves."""

from __future__ import annotations

from stages.report.retrieval import Retrieval
from trainyard.charts import numbers
from trainyard.charts.line_chart import Axis, LineChart, Series, line_chart
from trainyard.charts.numbers import is_number, whole

Drawn = LineChart | None

TIME = Axis("time of a query", numbers.milliseconds, numbers.milliseconds, is_log=True)
BYTES = Axis("bytes compared", numbers.size, numbers.size, is_log=True)


def recall_charts(retrieval: Retrieval | None) -> list[LineChart]:
    """Recall against the time of a query, and against what it reads, for numbers of lists."""
    searches = retrieval.searches if retrieval else ()
    if len(searches) < 2:
        return []
    by_time = [(s.milliseconds / 1e3, s.recall) for s in searches if s.milliseconds]
    by_bytes = [(s.bytes, s.recall) for s in searches if s.bytes]

    def chart(title: str, points: list[tuple[float, float]], axis: Axis, css: str) -> Drawn:
        series = Series("recall", tuple(sorted(points)), css, dots=True)
        return line_chart(title, [series], numbers.fixed(3), from_zero=True, axis=axis)

    charts = (
        chart("Recall by time of a query", by_time, TIME, "a"),
        chart("Recall by bytes compared with a query", by_bytes, BYTES, "c"),
    )
    return [one for one in charts if one is not None]


def recall_rows(retrieval: Retrieval | None) -> list[list[str]]:
    """A row for each number of lists: it, recall, time, bytes, and which is searched by default;
    none for an index that is searched in one way."""
    searches = retrieval.searches if retrieval else ()
    if len(searches) < 2:
        return []
    return [
        [
            whole(one.nprobe),
            numbers.fixed(3)(one.recall),
            "" if one.milliseconds is None else numbers.milliseconds(one.milliseconds / 1e3),
            "" if one.bytes is None else numbers.size(one.bytes),
            "default" if one.is_default else "",
        ]
        for one in searches
    ]


def retrieval_lead(retrieval: Retrieval | None) -> str:
    """The index and the table, in sentences."""
    if retrieval is None:
        return ""
    index, table, parts = retrieval.index, retrieval.table, []
    if index:
        parts.append(f"Index {index.get('index_str')}: {index.get('reason')}.")
    else:
        parts.append("The index was rebuilt since, so its recall is not shown.")
    if len(retrieval.searches) == 1:
        only = retrieval.searches[0]
        took = [] if only.milliseconds is None else [numbers.milliseconds(only.milliseconds / 1e3)]
        took += [] if only.bytes is None else [numbers.size(only.bytes)]
        each = f", a query {' and '.join(took)}" if took else ""
        parts.append(f"Recall {numbers.fixed(3)(only.recall)}{each}.")
    fewer, none = (table.get(key) for key in ("share_fewer", "share_none"))
    if is_number(fewer) and is_number(none):
        parts.append(
            f"{numbers.percent(fewer)} of the chunks have fewer than {table.get('num_neighbors')} "
            f"neighbours, {numbers.percent(none)} have none."
        )
    return " ".join(parts)
