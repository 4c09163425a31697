"""The load of experts on the run card: over the steps, and of every layer in the end."""

from __future__ import annotations

from stages.report.facts import Card
from trainyard.charts import numbers
from trainyard.charts.line_chart import LineChart, Series, line_chart

COLUMNS = ("layer", "busiest expert", "its load", "idlest expert", "its load")
DROP_COLUMNS = ("dropped by the busiest", "most dropping expert", "dropped by it")


def load_charts(card: Card) -> list[LineChart]:
    """Busiest and idlest expert of all layers, and what was dropped, by step."""

    def series(name: str, field: str, css: str) -> Series:
        return Series(name, card.steps.points(field), css)

    charts = (
        line_chart(
            "Load of experts",
            [series("busiest", "max_expert_load", "a"), series("idlest", "min_expert_load", "b")],
            numbers.fixed(2),
            from_zero=True,
            note="as a multiple of an even share",
        ),
        line_chart(
            "Dropped tokens",
            [series("dropped", "dropped_tokens", "c")],
            numbers.fixed(3),
            from_zero=True,
            note="share of the choices that were beyond capacity",
        ),
    )
    return [chart for chart in charts if chart is not None]


def load_columns(card: Card) -> tuple[str, ...]:
    """Names of the columns of `load_rows`."""
    return COLUMNS + DROP_COLUMNS if card.expert_drops else COLUMNS


def load_rows(card: Card) -> list[list[str]]:
    """For each layer its busiest and its idlest expert in the last step, and with a capacity the
    shares of their choices that experts dropped."""
    rows, drops = [], dict(card.expert_drops)
    for layer, shares in card.expert_loads:
        row = [str(layer)]
        for share in (max(shares), min(shares)):
            row += [str(shares.index(share)), numbers.fixed(2)(share * len(shares))]
        if layer in drops:
            busiest, most = drops[layer][shares.index(max(shares))], max(drops[layer])
            three = numbers.fixed(3)
            row += [three(busiest), str(drops[layer].index(most)), three(most)]
        rows.append(row)
    return rows
