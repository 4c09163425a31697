"""The page of the run card that says how fast the training was: performance.json of pretrain."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stages.report import formats
from stages.report.facts import Card
from stages.report.formats import DASH, DOT, is_number, milliseconds, scaled, three
from stages.report.markup import Child, Markup, el
from stages.report.tables import facts, section

PERCENTILES = (("p5", "5 %"), ("p50", "median"), ("p95", "95 %"), ("max", "longest"))


def performance(card: Card) -> Markup:
    """Speed, time of a step, memory and timers, with the conventions by name."""
    document = card.performance
    if not document:
        return Markup("")
    left = el("div", el("h3", "Speed"), facts(_speed(document)))
    right = el("div", el("h3", "Memory of a process"), facts(_memory(document)), _timers(document))
    conventions = _mapping(document.get("conventions"))
    notes = [str(conventions[key]) for key in ("flops", "mfu") if conventions.get(key)]
    under = el("p", f" {DOT} ".join(notes), class_="under") if notes else None
    lead = f"Over {document.get('steps_measured', 0)} steps, those that compile left out."
    return section(
        "How fast it trained", lead, el("div", left, right, class_="pair"), under or Markup("")
    )


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _speed(document: Mapping[str, Any]) -> list[tuple[Child, Child]]:
    rows: list[tuple[Child, Child]] = []
    for key, label, form in (
        ("tokens_per_second_per_gpu", "tokens per second and device", scaled),
        ("tflops_per_gpu", "TFLOP/s of each device", three),
        ("mfu", "model FLOPs utilisation", _percent),
        ("data_wait_share", "waiting for data", _percent),
    ):
        if is_number(document.get(key)):
            rows.append((label, form(document[key])))
    times = _mapping(document.get("step_ms"))
    rows += [
        (f"time of a step, {label}", milliseconds(times[key] / 1e3))
        for key, label in PERCENTILES
        if is_number(times.get(key))
    ]
    return rows


def _memory(document: Mapping[str, Any]) -> list[tuple[Child, Child]]:
    memory = _mapping(document.get("memory_bytes"))
    names = (("peak", "peak of the fullest"), ("planned", "foreseen"))
    return [
        (label, formats.size(memory[key])) for key, label in names if is_number(memory.get(key))
    ]


def _timers(document: Mapping[str, Any]) -> Markup | None:
    timers = _mapping(document.get("timers_ms"))
    rows: list[tuple[Child, Child]] = []
    for name, times in timers.items():
        ends = [
            milliseconds(times[end] / 1e3) for end in ("min", "max") if is_number(times.get(end))
        ]
        rows.append((name, f" {DASH} ".join(dict.fromkeys(ends))))
    if not rows:
        return None
    return el("div", el("h3", "Parts of a step, over ranks"), facts(rows), class_="block")


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
