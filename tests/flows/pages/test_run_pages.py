"""The table of the stages of a run."""

from __future__ import annotations

from flows.pages.run_pages import card_table, metrics_text, stage_table
from flows.recipes.summary import Summary


def test_the_table_has_a_row_for_each_stage() -> None:
    ran = Summary(
        job="merge",
        stage="merge",
        reused=False,
        reason="input a|b changed\nhere",
        seconds=1.26,
        output_digest="0123456789abcdef0123",
        metrics={"tokens": 1234567},
    )
    reused = Summary(job="plan", stage="plan", reused=True, reason="", seconds=0.3)
    rows = stage_table([ran, reused]).splitlines()[2:]
    assert rows == [
        "| `merge` | done | 1.3 | `0123456789ab` |",
        "| `plan` | reused | 0.3 |  |",
        "",
        "- `merge`: input a\\|b changed here; tokens 1,234,567",
    ]


def test_metrics_are_numbers_and_few() -> None:
    metrics = {"loss": 3.14159, "name": "x", "ok": True, "n": 5, "big": 12345.6, "b": 1, "c": 2}
    assert metrics_text(metrics) == "loss 3.142, n 5, big 12,345.6, b 1"


def test_the_page_of_the_run_card_has_its_most_important_numbers() -> None:
    metrics = {
        "parameters": 3145728,
        "tokens": 409600,
        "validation_before": {"step": 0, "loss": 8.3251, "perplexity": 4126.2},
        "validation_after": {"step": 200, "loss": 5.0123, "perplexity": 150.25},
        "tokens_per_second": 12345.6,
    }
    report = Summary(
        job="report", stage="report", reused=False, reason="", seconds=0.3, metrics=metrics
    )
    assert card_table([report], "http://here/card.html").splitlines() == [
        "[Open the run card](http://here/card.html)",
        "",
        "| of the run | |",
        "| --- | --- |",
        "| validation loss, nats per token | 8.325 to 5.012 |",
        "| validation perplexity, per token | 4,126.2 to 150.2 |",
        "| training speed, tokens/s | 12,345.6 |",
        "| tokens | 409,600 |",
        "| parameters | 3,145,728 |",
    ]
    assert card_table([], "card.html") == "[Open the run card](card.html)\n"
