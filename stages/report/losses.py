"""Further losses on the run card, such as those of multi-token prediction."""

from __future__ import annotations

from itertools import islice

from stages.report.facts import Card
from trainyard.charts import numbers
from trainyard.charts.line_chart import LineChart, Series, line_chart
from trainyard.charts.markup import printable

MAX_LOSSES = 12
"""Charts of a page."""
MAX_NAME = 60


def further_loss_charts(card: Card) -> list[LineChart]:
    """A chart of each, under its name in the log."""
    charts = (
        line_chart(
            printable(name)[:MAX_NAME],
            [Series(name, points, "b")],
            numbers.fixed(3),
        )
        for name, points in islice(card.steps.more_losses.items(), MAX_LOSSES)
    )
    return [chart for chart in charts if chart is not None]
