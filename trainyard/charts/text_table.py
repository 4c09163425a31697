"""Tables as text in a terminal."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from trainyard.logging import one_line

Cells = Sequence[str]


def text_table(rows: Sequence[Cells], left: Collection[int] = (0,)) -> list[str]:
    """Lines with aligned columns: those numbered in `left` to the left, the others to the right.

    Cells may hold any text: control characters are escaped."""
    cells = [[one_line(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]


def first_rows(rows: Sequence[Cells], max_rows: int) -> tuple[list[Cells], list[str]]:
    """The first `max_rows` rows (0: all), and a line that counts the rest."""
    shown = list(rows[: max_rows or len(rows)])
    more = len(rows) - len(shown)
    return shown, [f"and {more:,} more; --max-rows 0 shows all"] if more else []
