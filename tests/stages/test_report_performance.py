"""The parts of the run card about speed, and about what saving cost."""

from __future__ import annotations

import json

import pytest

from stages.report.facts import Card, Lineage, Save
from stages.report.formats import NARROW
from stages.report.page import render
from stages.report.performance import performance
from stages.report.saves import parse_saves, saves
from trainyard.checkpoint.background import SaveReport
from trainyard.errors import ArtifactError
from trainyard.training.logging.performance import performance_document
from trainyard.training.logging.run_info import RunInfo
from trainyard.training.loop.throughput import StepTiming

EMPTY = Card(title="run", lineage=Lineage(artifacts=(), edges=(), destination=""))


def card(**fields: object) -> Card:
    return Card(title="run", lineage=EMPTY.lineage, **fields)  # type: ignore[arg-type]


def test_what_pretrain_writes_is_shown_with_its_conventions() -> None:
    timings = [StepTiming(step, 250.0, 8000.0, 494.7, 5.0, 2**30) for step in range(1, 9)]
    facts = RunInfo(8, world_size=2, device_name="NVIDIA H200")
    timers = [{"forward-backward": 200.0}, {"forward-backward": 210.0}]
    document = performance_document(timings, facts, peaks=[10**9], planned_bytes=8e8, timers=timers)
    page = render(card(performance=document))
    for words in ("How fast it trained", "50.0 %", "dense bf16 peak", "forward-backward", "2.0 %"):
        assert words in page, words


def test_without_a_summary_or_with_an_odd_one_the_card_is_sound() -> None:
    assert performance(card()) == ""
    odd = {"steps_measured": 0, "mfu": None, "step_ms": 3, "timers_ms": {"x": {}}}
    assert "How fast" in render(card(performance=odd))


# --- saving -------------------------------------------------------------------------------------

REPORTS = [
    SaveReport(10, 2_000_000_000, 0.5, 4.0),
    SaveReport(15, 2_000_000_000, 0.25, 1.0, "local"),
    SaveReport(15, 2_000_000_000, 0.0, 5.0, "upload"),
    SaveReport(20, 2_000_000_000, 0.7, 2.0),
]


def test_what_saves_cost_is_shown_by_where_they_went() -> None:
    lines = "".join(json.dumps(report.document()) + "\n" for report in REPORTS)
    found = parse_saves(lines.encode(), "saves.jsonl")
    assert [(s.step, s.kind, s.size_bytes) for s in found] == [
        (report.step, report.kind, report.bytes) for report in REPORTS
    ]
    page = render(card(saves=found)).replace(NARROW, " ")
    section = page[page.index("What saving cost") :]
    for words in (
        *("in the run folder", "on nodes", "copied from nodes", "training waited 1.4 s in all"),
        *("2.00 GB", "0.750", "600 ms", "3.00 s", "4.00 s"),  # medians of two, the longest
    ):
        assert words in section, words


@pytest.mark.parametrize(
    "line",
    [
        b"{}",
        b"not json",
        b"[1]",
        b'{"step": "x", "bytes": 1, "blocked_seconds": 0, "durable_seconds": 1, "kind": "local"}',
        b'{"step": 1, "bytes": NaN, "blocked_seconds": 0, "durable_seconds": 1, "kind": "local"}',
    ],
)
def test_a_line_that_is_no_save_is_refused_by_its_place(line: bytes) -> None:
    with pytest.raises(ArtifactError, match=r"saves\.jsonl: line 2 is not a save"):
        parse_saves(b"\n" + line, "saves.jsonl")


def test_a_run_without_saves_or_of_kinds_unknown_has_no_such_section() -> None:
    assert saves(card()) == ""
    assert saves(card(saves=(Save(1, "by post", 1, 0.0, 1.0),))) == ""
