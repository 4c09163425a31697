"""Rows of text in columns."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from trainyard.logging import one_line


def grid(rows: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> list[str]:
    """Lines; the columns numbered in `left` begin at one place, the others end at one. Cells may be
    names and values of anybody's files."""
    cells = [[one_line(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]


def cut_off(rows: Sequence[Sequence[str]], most: int) -> tuple[list[Sequence[str]], list[str]]:
    """The first `most` rows (0: all), and a line about the rest."""
    shown = list(rows[: most or len(rows)])
    more = len(rows) - len(shown)
    return shown, [f"and {more:,} more; --max-rows 0 shows all"] if more else []
