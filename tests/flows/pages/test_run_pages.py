"""The table of the stages of a run."""

from __future__ import annotations

from flows.pages.run_pages import metrics_text, stage_table
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
        "| `merge` | done | 1.3 | `0123456789ab` | input a\\|b changed here | tokens 1,234,567 |",
        "| `plan` | reused | 0.3 |  |  |  |",
    ]


def test_metrics_are_numbers_and_few() -> None:
    metrics = {"loss": 3.14159, "name": "x", "ok": True, "n": 5, "big": 12345.6, "b": 1, "c": 2}
    assert metrics_text(metrics) == "loss 3.142, n 5, big 12,345.6, b 1"
