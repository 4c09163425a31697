"""Compares two checkpoints, and shows the differences. Imports torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

from stages.inspect.config import InspectConfig
from stages.inspect.tables import shown
from stages.runtime.context import StageRun
from trainyard.charts.text_table import first_rows, text_table
from trainyard.checkpoint.compare import (
    KeyDifference,
    Largest,
    TensorDifference,
    compare_documents,
    compare_tensors,
)
from trainyard.checkpoint.load import open_checkpoint

FORMAT_VERSION = 1

ABSENT = "(absent)"

MAX_TABLE_ROWS = 8
"""A document's table that only one checkpoint has is one row when it has more keys than this."""

TENSOR_HEAD = ("tensor", "what", "elements", "largest", "at", "values", "relative", "at")


@dataclass(frozen=True, slots=True)
class Differences:
    """All differences between two checkpoints."""

    ours: str
    theirs: str
    compared: int
    """Tensors of either checkpoint that match --filter."""
    tensors: tuple[TensorDifference, ...]
    keys: tuple[KeyDifference, ...]

    @property
    def count(self) -> int:
        """0 for equal checkpoints."""
        return len(self.tensors) + len(self.keys)

    @property
    def summary(self) -> str:
        """The numbers of differences."""
        return (
            f"{len(self.tensors):,} of {self.compared:,} tensors, {len(self.keys):,} keys of "
            "documents and other files"
        )

    def document(self) -> dict[str, Any]:
        """A JSON document; NaN and infinities are strings."""
        return {
            "format_version": FORMAT_VERSION,
            "ours": self.ours,
            "theirs": self.theirs,
            "equal": not self.count,
            "compared_tensors": self.compared,
            "tensors": [_finite(asdict(found)) for found in self.tensors],
            "documents": [_finite(asdict(found)) for found in self.keys],
        }

    def table(self, max_rows: int) -> str:
        """Text for a terminal."""
        lines = [f"ours    {self.ours}", f"theirs  {self.theirs}"]
        if self.tensors:
            rows, more = first_rows([_cells(found) for found in self.tensors], max_rows)
            lines += ["", *text_table([TENSOR_HEAD, *rows], left=(0, 1)), *more]
        if self.keys:
            rows, more = first_rows(list(_key_rows(self.keys)), max_rows)
            head = ("document", "key", "ours", "theirs")
            lines += ["", *text_table([head, *rows], left=(0, 1, 2, 3)), *more]
        if not self.count:
            lines += ["", f"equal: {self.compared:,} tensors, bit for bit"]
        return "\n".join(lines)


def differences(
    config: InspectConfig, diff: str, matches: Callable[[str], bool], stage: StageRun
) -> Differences:
    """Compare the tensors that match; without --filter, documents too."""
    verify = config.verify_checkpoint
    with (
        open_checkpoint(config.checkpoint, "--checkpoint", verify) as ours,
        open_checkpoint(diff, "--diff", verify) as theirs,
    ):
        ours.check()
        theirs.check()
        names = [name for name in ours.index if matches(name)]
        total = sum(ours.spec(name).size_bytes for name in names)
        with stage.progress(total, "bytes", "compare") as progress:
            tensors = tuple(compare_tensors(ours, theirs, matches, progress.update))
        keys = () if config.filter else tuple(compare_documents(ours, theirs))
        compared = len({name for side in (ours, theirs) for name in side.index if matches(name)})
        return Differences(ours.url, theirs.url, compared, tensors, keys)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


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
    sides = (f"{absolute.difference:.3g}", _index(absolute), values)
    return found.name, what, elements, *sides, f"{relative.difference:.3g}", _index(relative)


def _index(largest: Largest) -> str:
    return "[" + ", ".join(map(str, largest.index)) + "]"


def _key_rows(found: Sequence[KeyDifference]) -> Iterator[tuple[str, str, str, str]]:
    """A row for each key; one row for a large table that only one checkpoint has."""
    for (document, table, only_in), group in groupby(found, _table_of):
        keys = list(group)
        if only_in is None or table is None or len(keys) <= MAX_TABLE_ROWS:
            for key in keys:
                yield document, shown(key.key), _side(key, "ours"), _side(key, "theirs")
            continue
        count = f"({len(keys):,} keys)"
        ours, theirs = (count, ABSENT) if only_in == "ours" else (ABSENT, count)
        yield document, f"{table}.*", ours, theirs


def _table_of(found: KeyDifference) -> tuple[str, str | None, str | None]:
    table, dot, _ = found.key.partition(".")
    return found.document, table if dot and found.document != "files" else None, found.only_in


def _side(found: KeyDifference, side: str) -> str:
    if found.only_in not in (None, side):
        return ABSENT
    return shown(found.ours if side == "ours" else found.theirs) or '""'
