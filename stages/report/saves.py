"""The part of the run card about saving: saves.jsonl of pretrain."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from stages.report import formats
from stages.report.charts import Series, line_chart
from stages.report.facts import Card, Save
from stages.report.formats import is_number, milliseconds, three, whole
from stages.report.markup import Child, Markup, el
from stages.report.tables import section
from trainyard.errors import ArtifactError

FILE = "saves.jsonl"

KINDS = (
    ("durable", "in the run folder", "a"),
    ("local", "on nodes", "b"),
    ("global", "in a folder between", "c"),
    ("upload", "copied from nodes", "d"),
)
"""Of saves, in words, and how they are coloured."""


def parse_saves(data: bytes, url: str) -> tuple[Save, ...]:
    """The lines of the file; ArtifactError for one that is no save."""
    return tuple(
        _parse(line, f"{url}: line {number}")
        for number, line in enumerate(data.splitlines(), 1)
        if line.strip()
    )


def _parse(line: bytes, where: str) -> Save:
    try:
        found: dict[str, Any] = json.loads(line)
        numbers = [found[key] for key in ("step", "bytes", "blocked_seconds", "durable_seconds")]
        if not all(map(is_number, numbers)):
            raise ValueError("not all of its figures are numbers")
        step, size, blocked, durable = numbers
        return Save(int(step), str(found["kind"]), int(size), float(blocked), float(durable))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ArtifactError(f"{where} is not a save: {error!r}") from error


@dataclass(frozen=True, slots=True)
class _Column:
    name: str
    value: Callable[[Sequence[Save]], str]


def _middle(figure: Callable[[Save], float]) -> Callable[[Sequence[Save]], float]:
    return lambda saves: statistics.median(figure(save) for save in saves)


def _longest(saves: Sequence[Save]) -> str:
    return milliseconds(max(save.durable_seconds for save in saves))


_SIZE = _middle(lambda save: save.size_bytes)
_RATE = _middle(lambda save: save.size_bytes / 1e9 / max(save.durable_seconds, 1e-9))
_BLOCKED = _middle(lambda save: save.blocked_seconds)
_DURABLE = _middle(lambda save: save.durable_seconds)

COLUMNS = (
    _Column("saves", lambda saves: whole(len(saves))),
    _Column("size", lambda saves: formats.size(_SIZE(saves))),
    _Column("GB/s", lambda saves: three(_RATE(saves))),
    _Column("training waited", lambda saves: milliseconds(_BLOCKED(saves))),
    _Column("whole after", lambda saves: milliseconds(_DURABLE(saves))),
    _Column("at most after", _longest),
)


def saves(card: Card) -> Markup:
    """What saving cost: medians by place, and every save by its step."""
    if not card.saves:
        return Markup("")
    by_kind = [
        (words, css, [save for save in card.saves if save.kind == kind])
        for kind, words, css in KINDS
    ]
    shown = [(words, css, found) for words, css, found in by_kind if found]
    if not shown:
        return Markup("")
    blocked = sum(save.blocked_seconds for save in card.saves)
    lead = (
        f"Medians; training waited {formats.duration(blocked)} in all. A save is whole when its "
        "manifest stands."
    )
    charts = el("div", *_charts(shown), class_="pair block")
    return section("What saving cost", lead, _table(shown), charts)


def _charts(shown: Sequence[tuple[str, str, list[Save]]]) -> list[Markup]:
    """By step: what training waited, and until a save was whole."""
    figures: tuple[tuple[str, str, Callable[[Save], float]], ...] = (
        ("save-blocked", "Training waited", lambda save: save.blocked_seconds),
        ("save-whole", "Whole after", lambda save: save.durable_seconds),
    )
    return [
        line_chart(
            ident,
            title,
            [
                Series(words, tuple((save.step, figure(save)) for save in found), css, True)
                for words, css, found in shown
                if any(map(figure, found))  # training does not wait for copies
            ],
            milliseconds,
            zero=True,
            note="seconds",
        )
        for ident, title, figure in figures
    ]


def _table(shown: Sequence[tuple[str, str, list[Save]]]) -> Markup:
    head = [el("th", "steps saved", scope="col")]
    head += [el("th", column.name, scope="col") for column in COLUMNS]
    rows = []
    for words, _, found in shown:
        cells: list[Child] = [el("td", column.value(found)) for column in COLUMNS]
        rows.append(el("tr", el("td", words), *cells))
    table = el("table", el("thead", el("tr", *head)), el("tbody", *rows), class_="numbers")
    return el("div", table, class_="scroll")
