"""The table of every cut in docs/parallelism.md: that of these cuts, and of no others."""

from __future__ import annotations

import re

import pytest

from tests.trainyard.training.layouts.cases import all_cuts
from tests.trainyard.training.layouts.compare import Distance
from tests.trainyard.training.layouts.cross import BEGIN, END, PAGE, Measured, table, written

NOTHING = Measured(Distance(0.0, 0.0, 0.0, 0.0), 1.0)


def counts(text: str) -> list[tuple[str, list[int]]]:
    """Of each row, its head and how many cuts each cell stands for."""
    rows = [line.split("|")[1:-1] for line in text.splitlines() if re.match(r"\| (whole|tp)", line)]
    return [
        (row[0], [int(cell.split(":")[0] or 0) for cell in map(str.strip, row[1:])]) for row in rows
    ]


@pytest.mark.slow
def test_the_page_lists_all_layouts() -> None:
    fresh = table({str(cut): NOTHING for cut in all_cuts()}, "2000-01-01")
    page = PAGE.read_text()
    generated = page[page.index(BEGIN) : page.index(END)]
    shown, there_are = counts(generated), dict(counts(fresh))
    for row, cells in shown:
        pairs = zip(cells, there_are[row], strict=True)
        assert all(n <= most for n, most in pairs), f"{row}: run the command that the page names"
    total = sum(sum(cells) for _, cells in shown)
    assert f"{total} of {len(all_cuts())} cuts, all within the tolerances" in generated


def test_only_the_generated_part_is_replaced() -> None:
    fresh = table({str(cut): NOTHING for cut in all_cuts()}, "2000-01-01")
    page = PAGE.read_text()
    assert (
        written(written(page, fresh), page[page.index(BEGIN) : page.index(END) + len(END)]) == page
    )
    assert sum(sum(cells) for _, cells in counts(fresh)) == len(all_cuts())


def test_names_of_layouts_are_distinct() -> None:
    assert len({str(cut) for cut in all_cuts()}) == len(all_cuts())
