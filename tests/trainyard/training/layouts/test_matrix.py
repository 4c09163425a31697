"""The table of families and layouts in docs/models.md is what was recorded of the tests beside this
file."""

from __future__ import annotations

import pytest

from tests.records import recorded
from tests.trainyard.training.layouts.cases import Cut
from tests.trainyard.training.layouts.matrix import (
    COLUMNS,
    EVERY_LAYOUT,
    FAMILIES,
    PAGE,
    all_tested,
    table,
    written,
)


@pytest.mark.slow
def test_the_page_has_the_table_of_the_records() -> None:
    page = PAGE.read_text()
    command = "python -m tests.trainyard.training.layouts.matrix --write"
    assert page == written(page, recorded()), command


@pytest.mark.slow
def test_every_case_was_recorded_but_of_the_516_that_take_an_hour() -> None:
    cases = [case for _, case in all_tested()]
    assert len(set(cases)) == len(cases), "two cases have one name"
    missing = {test for test, case in cases if case not in recorded().get(test, {})}
    assert missing <= {EVERY_LAYOUT}  # of which the table says how many ran


def test_a_cell_is_what_came_of_its_cases() -> None:
    tested = [(Cut(kind="bert", tensor="tp2 sp"), ("t", "a")), (Cut(kind="t5", pp=2), ("t", "b"))]
    rows = table(tested, {"t": {"a": "passed 2000-01-01 c", "b": "failed 2000-01-02 c"}})
    *lines, _, summary = rows.splitlines()[2:]
    said = {row.split(" | ")[0].strip("| "): row.split(" | ")[1:] for row in lines}
    assert said.keys() == FAMILIES.keys()
    expected = ["yes" if name in ("tensor", "sequence") else "-" for name in COLUMNS]
    assert [cell.strip("| ") for cell in said["BERT"]] == expected
    assert {cell.strip("| ") for cell in said["T5"]} == {"-", "failed"}
    assert {cell.strip("| ") for cell in said["Retro"]} == {"-"}
    assert summary == "1 of its 2 cases passed in recorded runs, 2000-01-01 to 2000-01-02."
