"""The part of the run card that says what was proven of the run: the document of certify."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stages.report import formats
from stages.report.facts import Card
from stages.report.formats import DASH, DOT, is_number
from stages.report.markup import Child, Markup, el, join
from stages.report.tables import facts, section
from trainyard.artifacts import store
from trainyard.errors import ArtifactError, ConfigError

VERDICTS = ("proven", "broken")
FORMAT_VERSION = 1


def read_certificate(url: str | None, checkpoint: str, lineage: str) -> dict[str, Any] | None:
    """The document at a URL. Raises ArtifactError for what is none, ConfigError for that of another
    run than `lineage`."""
    if url is None:
        return None
    document: dict[str, Any] = store.read_json(url)
    known = isinstance(document, dict) and document.get("verdict") in VERDICTS
    if not known or document.get("format_version") != FORMAT_VERSION:
        raise ArtifactError(
            f"{url}: not a certificate; make one with python -m stages.certify {checkpoint} "
            f"--output {url}"
        )
    if document.get("lineage") != lineage:
        raise ConfigError(
            f"--certificate {url}: of another run than --checkpoint {checkpoint}; make it anew "
            f"with python -m stages.certify {checkpoint} --output {url}"
        )
    return document


def verdict(card: Card) -> dict[str, Any]:
    """What the summary says of it."""
    document = card.certificate
    if not document:
        return {}
    names = ("verdict", "complete", "first_step", "last_step", "train_samples", "first_broken_link")
    return {name: document[name] for name in names if document.get(name) is not None}


def certificate(card: Card) -> Markup:
    """The verdict, each check, and how the run was cut over its life."""
    document = card.certificate
    if not document:
        return Markup("")
    table = el("table", el("thead", _row("th", *HEADINGS)), el("tbody", *_checks(document)))
    left = el("div", el("h3", "Links"), el("div", table, class_="scroll"))
    right = el("div", el("h3", "The run"), facts(_facts(document), "words"))
    pair = el("div", left, right, class_="pair")
    return section("What is certified", _lead(document), pair, _remarks(document))


HEADINGS = ("what", "checked", "result")


def _row(cell: str, *values: Child) -> Markup:
    return el("tr", *[el(cell, value) for value in values])


def _lead(document: Mapping[str, Any]) -> str:
    link = document.get("first_broken_link")
    if isinstance(link, dict):
        told = {name: link.get(name, "") for name in ("step", "check", "expected", "found")}
        return (
            f"Broken at step {told['step']}, {told['check']}: expected {told['expected']}, found "
            f"{told['found']}."
        )
    first, last = document.get("first_step"), document.get("last_step")
    whole = "" if document.get("complete") else " Not everything could be checked."
    return (
        f"Proven: steps {first} to {last} follow each other; no sample was lost, and none "
        f"repeated.{whole}"
    )


def _checks(document: Mapping[str, Any]) -> list[Markup]:
    rows = []
    for check in _tables(document.get("checks")):
        note = str(check.get("note") or "")
        result = join([str(check.get("result", "")), f" {DASH} {note}" if note else ""])
        shown = formats.whole(check["checked"]) if is_number(check.get("checked")) else ""
        rows.append(_row("td", str(check.get("what", "")), shown, result))
    return rows


def _facts(document: Mapping[str, Any]) -> list[tuple[Child, Child]]:
    rows: list[tuple[Child, Child]] = [("begins at", str(document.get("begins_at", "")))]
    for key, label in (("train_samples", "samples"), ("tokens", "tokens")):
        if is_number(document.get(key)):
            rows.append((label, formats.whole(document[key])))
    rows.append(("checkpoints", str(len(_list(document.get("published_steps"))))))
    for span in _tables(document.get("spans")):
        steps = f"steps {span.get('first_step')} {DASH} {span.get('last_step')}"
        ranks = f"{span.get('data_parallel_size')} data-parallel ranks"
        rows.append((steps, f"{ranks} {DOT} micro-batches of {span.get('micro_batch_size')}"))
    rows.append(("ledger", el("span", str(document.get("ledger_digest", "")), class_="digest")))
    return rows


def _remarks(document: Mapping[str, Any]) -> Markup:
    remarks = [str(remark) for remark in _list(document.get("remarks"))]
    return el("p", f" {DOT} ".join(remarks), class_="under") if remarks else Markup("")


def _tables(value: Any) -> list[Mapping[str, Any]]:
    return [entry for entry in _list(value) if isinstance(entry, dict)]


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
