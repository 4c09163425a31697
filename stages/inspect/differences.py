"""What differs between two checkpoints: for people, and for programs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

from stages.inspect.grid import cut_off, grid
from stages.inspect.tables import shown
from trainyard.checkpoint.compare import KeyDifference, Largest, TensorDifference

FORMAT_VERSION = 1

ABSENT = "(absent)"

MOST_OF_A_TABLE = 8
"""Keys of a table that only one side has which are told one by one; --json tells all."""

TENSOR_HEAD = ("tensor", "what", "elements", "largest", "at", "values", "relative", "at")


@dataclass(frozen=True, slots=True)
class Differences:
    """All of them."""

    ours: str
    theirs: str
    compared: int
    """Tensors that either has, and that were asked for."""
    tensors: tuple[TensorDifference, ...]
    keys: tuple[KeyDifference, ...]

    @property
    def count(self) -> int:
        """0 for equal checkpoints."""
        return len(self.tensors) + len(self.keys)

    @property
    def summary(self) -> str:
        """In a line."""
        return (
            f"{len(self.tensors):,} of {self.compared:,} tensors, {len(self.keys):,} keys of "
            "documents and other files"
        )

    def document(self) -> dict[str, Any]:
        """For programs; what is no finite number is a string."""
        return {
            "format_version": FORMAT_VERSION,
            "ours": self.ours,
            "theirs": self.theirs,
            "equal": not self.count,
            "compared_tensors": self.compared,
            "tensors": [_finite(asdict(found)) for found in self.tensors],
            "documents": [_finite(asdict(found)) for found in self.keys],
        }


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def differences_table(found: Differences, max_rows: int) -> str:
    """For people."""
    lines = [f"ours    {found.ours}", f"theirs  {found.theirs}"]
    if found.tensors:
        shown_rows, more = cut_off([_cells(t) for t in found.tensors], max_rows)
        lines += ["", *grid([TENSOR_HEAD, *shown_rows], left=(0, 1)), *more]
    if found.keys:
        rows = list(_key_rows(found.keys))
        shown_keys, more = cut_off(rows, max_rows)
        head = ("document", "key", "ours", "theirs")
        lines += ["", *grid([head, *shown_keys], left=(0, 1, 2, 3)), *more]
    if not found.count:
        lines += ["", f"equal: {found.compared:,} tensors, bit for bit"]
    return "\n".join(lines)


def _cells(found: TensorDifference) -> tuple[str, ...]:
    nothing = ("",) * 6
    if found.ours is None or found.theirs is None:
        return found.name, "only in " + ("theirs" if found.ours is None else "ours"), *nothing
    if found.ours.shape != found.theirs.shape:
        return found.name, f"{found.ours.text}, {found.theirs.text}", *nothing
    same_type = found.ours.dtype == found.theirs.dtype
    what = "values" if same_type else f"{found.ours.dtype}, {found.theirs.dtype}"
    absolute, relative = found.absolute, found.relative
    if absolute is None or relative is None:
        return found.name, what + ("" if same_type else ", values equal"), *nothing
    elements = f"{found.differing:,} of {math.prod(found.ours.shape):,}"
    values = f"{absolute.ours:.9g}, {absolute.theirs:.9g}"
    sides = (f"{absolute.difference:.3g}", _place(absolute), values)
    return found.name, what, elements, *sides, f"{relative.difference:.3g}", _place(relative)


def _place(largest: Largest) -> str:
    return "[" + ", ".join(map(str, largest.index)) + "]"


def _key_rows(found: Sequence[KeyDifference]) -> Iterator[tuple[str, str, str, str]]:
    """A row for each; one for a table of a document that only one side has, if it has many keys."""
    for (document, table, only_in), group in groupby(found, _table_of):
        keys = list(group)
        if only_in is None or table is None or len(keys) <= MOST_OF_A_TABLE:
            for key in keys:
                yield document, shown(key.key), _side(key, "ours"), _side(key, "theirs")
            continue
        told = f"({len(keys):,} keys)"
        ours, theirs = (told, ABSENT) if only_in == "ours" else (ABSENT, told)
        yield document, f"{table}.*", ours, theirs


def _table_of(found: KeyDifference) -> tuple[str, str | None, str | None]:
    table, dot, _ = found.key.partition(".")
    return found.document, table if dot and found.document != "files" else None, found.only_in


def _side(found: KeyDifference, side: str) -> str:
    if found.only_in not in (None, side):
        return ABSENT
    return shown(found.ours if side == "ours" else found.theirs) or '""'
