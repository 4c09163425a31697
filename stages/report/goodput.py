"""The part of the run card about time: how much of what was held went into steps that were kept.

The document is the one that a flow keeps (flows/goodput/report.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stages.report import formats
from stages.report.facts import Card
from stages.report.formats import is_number, whole
from stages.report.markup import Child, Markup, el
from stages.report.tables import section
from trainyard.artifacts import store
from trainyard.errors import ArtifactError

KINDS = (
    ("queue", "waiting in a queue", "source"),
    ("start", "starting", "source"),
    ("restore", "loading a checkpoint", "source"),
    ("compile", "compiling", "source"),
    ("data_wait", "waiting for data", "source"),
    ("step", "steps that were kept", "model"),
    ("evaluation", "measuring the loss", "measure"),
    ("checkpoint", "waiting for saves", "source"),
    ("lost", "steps that were lost", "source"),
    ("idle", "holding everything, doing nothing", "source"),
    ("between", "between attempts", "source"),
)
"""Of time, in words, and the family that colours each."""


SHOWN_SECONDS = 0.05
"""What took less has no bar."""


def read_goodput(url: str | None) -> dict[str, Any] | None:
    """The document at a URL; None where there is none (yet)."""
    if url is None or not store.exists(url):
        return None
    document = store.read_json(url)
    if not isinstance(document, dict) or not isinstance(document.get("spent_seconds"), dict):
        raise ArtifactError(f"{url}: not an account of a run's time; leave out --goodput")
    return document


def goodput(card: Card) -> Markup:
    """A bar for each thing that time went into, and every attempt."""
    document = card.goodput
    if not document:
        return Markup("")
    spent, shares = document["spent_seconds"], document.get("spent_percent") or {}
    shown = [
        kind for kind in KINDS if is_number(spent.get(kind[0])) and spent[kind[0]] >= SHOWN_SECONDS
    ]
    if not shown:
        return Markup("")
    longest = max(spent[name] for name, _, _ in shown)
    rows = [
        _row(words, css, spent[name], spent[name] / longest, shares.get(name))
        for name, words, css in shown
    ]
    table = el("table", el("tbody", *rows), class_="time")
    return section("How much of it was training", _lead(document), table, _attempts(document))


def _is_shown(seconds: Any) -> bool:
    return is_number(seconds) and seconds >= SHOWN_SECONDS


def _row(words: str, css: str, seconds: float, length: float, percent: Any) -> Markup:
    bar = el("span", class_=f"bar {css}", style=f"width:{100 * length:.2f}%")
    share = f"{percent:.1f}%" if is_number(percent) else ""
    return el(
        "tr",
        el("th", words, scope="row"),
        el("td", bar, class_="bars"),
        el("td", formats.duration(seconds), class_="amount"),
        el("td", share, class_="share"),
    )


def _lead(document: Mapping[str, Any]) -> str:
    attempts = document.get("attempts") or []
    of = f"{len(attempts)} attempts" if len(attempts) > 1 else "one attempt"
    share, held = document.get("goodput"), document.get("allocated_seconds")
    if not is_number(share) or not is_number(held):
        return f"Over {of}."
    return (
        f"Goodput {100 * float(share or 0):.1f} %: of the {formats.duration(float(held or 0))} in "
        f"which {of} held what was asked for, so much went into steps that were kept. Shares are "
        "of all time from the first request to the last end."
    )


def _attempts(document: Mapping[str, Any]) -> Markup:
    rows = [_attempt(attempt) for attempt in document.get("attempts") or ()]
    if len(rows) < 2:
        return Markup("")
    names = ("attempt", "held", "ranks", "steps", "lost", "ended")
    head = el("tr", *[el("th", name, scope="col") for name in names])
    table = el("table", el("thead", head), el("tbody", *rows), class_="numbers")
    area = el("div", table, class_="scroll", tabindex="0", role="region", aria_label="attempts")
    return el("details", el("summary", f"{len(rows)} attempts"), area, class_="more-options")


def _attempt(row: Mapping[str, Any]) -> Markup:
    first, last = row.get("from_step"), row.get("last_step")
    steps = ""
    if first is not None:
        steps = f"{whole(first)} to {whole(first if last is None else last)}"
    lost = (row.get("spent") or {}).get("lost")
    cells: tuple[Child, ...] = (
        row.get("attempt"),
        formats.duration(row["end"] - row["begin"]),
        row.get("ranks"),
        steps,
        formats.duration(lost) if lost else None,
        row.get("ended"),
    )
    return el("tr", *[el("td", cell) for cell in cells])
