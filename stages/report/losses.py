"""Losses beside that of the tokens on the run card, such as those of multi-token prediction."""

from __future__ import annotations

from itertools import islice

from stages.report.facts import Card
from trainyard.charts import numbers
from trainyard.charts.line_chart import LineChart, Series, finite, line_chart
from trainyard.charts.markup import printable

MAX_LOSSES = 12
"""Charts of a page."""
MAX_NAME = 60


def further_loss_charts(card: Card) -> list[LineChart]:
    """A chart of each, under its name in the log."""
    names = dict.fromkeys(name for step in card.steps for name in step.more_losses)
    charts = (
        line_chart(
            printable(name)[:MAX_NAME],
            [Series(name, finite([(s.step, s.more_losses.get(name)) for s in card.steps]), "b")],
            numbers.fixed(3),
        )
        for name in islice(names, MAX_LOSSES)
    )
    return [chart for chart in charts if chart is not None]
