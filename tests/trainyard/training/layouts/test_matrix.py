"""The table of families and layouts in docs/models.md is what the tests beside this file run."""

from __future__ import annotations

import pytest

from tests.trainyard.training.layouts.cases import Cut
from tests.trainyard.training.layouts.matrix import COLUMNS, FAMILIES, PAGE, table, written


@pytest.mark.slow
def test_the_page_has_the_table_of_the_tests() -> None:
    page = PAGE.read_text()
    assert page == written(page), "python -m tests.trainyard.training.layouts.matrix --write"


def test_a_cell_is_the_work_of_a_case() -> None:
    rows = table([Cut(kind="bert", tensor="tp2 sp")]).splitlines()[2:]
    said = {row.split(" | ")[0].strip("| "): row.split(" | ")[1:] for row in rows}
    assert said.keys() == FAMILIES.keys()
    expected = ["yes" if name in ("tensor", "sequence") else "-" for name in COLUMNS]
    assert [cell.strip("| ") for cell in said["BERT"]] == expected
    assert {cell.strip("| ") for cell in said["T5"]} == {"-"}
