"""The part of the run card about speed."""

from __future__ import annotations

from stages.report.facts import Card, Lineage
from stages.report.page import render
from stages.report.performance import performance
from trainyard.training.facts import RunFacts
from trainyard.training.metrics import StepTiming
from trainyard.training.performance import performance_document

EMPTY = Card(title="run", lineage=Lineage(artifacts=(), edges=(), destination=""))


def card(**fields: object) -> Card:
    return Card(title="run", lineage=EMPTY.lineage, **fields)  # type: ignore[arg-type]


def test_what_pretrain_writes_is_shown_with_its_conventions() -> None:
    timings = [StepTiming(step, 250.0, 8000.0, 494.7, 5.0, 2**30) for step in range(1, 9)]
    facts = RunFacts(8, world_size=2, device_name="NVIDIA H200")
    timers = [{"forward-backward": 200.0}, {"forward-backward": 210.0}]
    document = performance_document(timings, facts, peaks=[10**9], planned_bytes=8e8, timers=timers)
    page = render(card(performance=document))
    for words in ("How fast it trained", "50.0 %", "dense bf16 peak", "forward-backward", "2.0 %"):
        assert words in page, words


def test_without_a_summary_or_with_an_odd_one_the_card_is_sound() -> None:
    assert performance(card()) == ""
    odd = {"steps_measured": 0, "mfu": None, "step_ms": 3, "timers_ms": {"x": {}}}
    assert "How fast" in render(card(performance=odd))
