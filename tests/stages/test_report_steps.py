"""The steps of a run card."""

from __future__ import annotations

from stages.report.steps import Speeds


def test_speeds_come_in_any_order_and_the_later_line_of_a_step_counts() -> None:
    lines = [(9000, 1.0), (3, 2.0), (4, None), (9000, 3.0)]
    speeds = Speeds({"step": step, "tokens_per_second": speed} for step, speed in lines)
    assert [speeds.of(step) for step in (3, 4, 5, 8999, 9000)] == [2.0, None, None, None, 3.0]
