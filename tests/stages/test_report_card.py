"""The sections of the run card about speed, saves and goodput."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flows.goodput.account import KINDS
from stages.report.card import GOODPUT_KINDS, render
from stages.report.collect import read_goodput
from stages.report.facts import Card, Save
from stages.report.lineage import Lineage
from stages.report.run_lines import expert_shares, parse_saves
from stages.report.steps import Step, Steps
from tests.stages.html_page import Page, check_sound
from trainyard.checkpoint.background import SaveReport
from trainyard.errors import ArtifactError
from trainyard.training.logging.performance import performance_document
from trainyard.training.logging.run_info import RunInfo
from trainyard.training.loop.throughput import StepTiming

LINEAGE = Lineage(artifacts=(), edges=(), destination="")


def page(**facts: Any) -> Page:
    return check_sound(render(Card(title="run", lineage=LINEAGE, **facts)))


# --- performance --------------------------------------------------------------------------------


def test_the_performance_of_pretrain_is_shown_with_its_conventions() -> None:
    timings = [StepTiming(step, 250.0, 8000.0, 494.7, 5.0, 2**30) for step in range(1, 9)]
    info = RunInfo(8, world_size=2, device_name="NVIDIA H200")
    timers = [{"forward-backward": 200.0}, {"forward-backward": 210.0}]
    document = performance_document(timings, info, peaks=[10**9], planned_bytes=8e8, timers=timers)
    section = page(performance=document).sections["How fast it trained"]
    assert "dense bf16 peak" in section.text
    assert section.facts == {
        "tokens per second and device": "4 000",
        "TFLOP/s of each device": "495",
        "model FLOPs utilization": "50.0 %",
        "waiting for data": "2.0 %",
        "time of a step, 5 %": "250 ms",
        "time of a step, median": "250 ms",
        "time of a step, 95 %": "250 ms",
        "time of a step, longest": "250 ms",
        "highest peak": "1.00 GB",
        "planned": "800 MB",
        "forward-backward": "200 ms \u2013 210 ms",
    }


def test_rows_missing_from_a_performance_document_are_left_out() -> None:
    odd = {"steps_measured": 0, "mfu": None, "step_ms": 3, "timers_ms": {"x": {}}}
    assert page(performance=odd).sections["How fast it trained"].facts == {}


def test_a_quantization_and_a_load_test_are_shown() -> None:
    small = {"method": "fp8", "strategy": "channel", "bytes_before": 4e9, "bytes_after": 1.1e9}
    small |= {"ppl_before": 8.01, "ppl_after": 8.05, "ppl_ratio": 1.005}
    times = {"p50": 0.2, "p99": 0.9}
    one = {"name": "4 requests/s", "num_completed": 98, "num_failed": 2, "ttft": times}
    one |= {"output_tokens_per_second": 310.0, "tpot": None, "e2el": {"p50": 1.0, "p99": 3.0}}
    section = page(quantization=small, load={"measurements": [one]}).sections["How good, how fast"]
    assert "Weights in fp8, a scale for each output channel" in section.text
    assert "Load: 4 requests/s" in section.text
    assert section.facts == {
        "weights before": "4.00 GB",
        "weights after": "1.10 GB",
        "perplexity before": "8.01",
        "perplexity after": "8.05",
        "after / before": "1.0050",
        "requests done": "98",
        "requests failed": "2",
        "output tokens per second": "310",
        "time to first token": "200 ms \u00b7 p99 900 ms",
        "end to end": "1.00 s \u00b7 p99 3.00 s",
    }


def test_the_gate_of_a_release_is_shown() -> None:
    rows = [{"engine": "static, one by one", "max_difference": 2e-6}, {"engine": "no figures"}]
    parity = {"precision": "fp32", "tolerance": 0.001, "rows": rows}
    section = page(parity=parity).sections["How good, how fast"]
    assert "in nats, in fp32" in section.text
    assert section.facts == {"static, one by one": "2e-06", "allowed": "0.001"}


# --- losses -------------------------------------------------------------------------------------


def test_losses_beside_that_of_the_tokens_have_charts_of_their_own() -> None:
    steps = [Step(step=n, loss=3.0, more_losses={"mtp_1 loss": 3.2 - n / 10}) for n in (1, 2)]
    found = render(Card(title="run", lineage=LINEAGE, steps=Steps(steps)))
    assert found.count("mtp_1 loss") >= 1
    assert "mtp_1 loss" not in render(
        Card(title="run", lineage=LINEAGE, steps=Steps([Step(step=1, loss=3.0)]))
    )


# --- experts ------------------------------------------------------------------------------------


def test_the_load_of_experts_is_shown_by_step_and_by_layer() -> None:
    line = {
        "layer_loads": {"0": [0.5, 0.25, 0.25], "2": [0.1, 0.2, 0.7]},
        "layer_drops": {"0": [0.25, 0.0, 0.5], "2": [0.0, 0.0, 0.125]},
    }
    loads, drops = (expert_shares(line, name) for name in line)
    steps = [
        Step(step=n, max_expert_load=2.1, min_expert_load=0.3, dropped_tokens=0.01) for n in (1, 2)
    ]
    section = page(steps=Steps(steps), expert_loads=loads).sections["How experts were used"]
    assert section.rows[-2:] == [
        ["0", "0", "1.50", "1", "0.75"],
        ["2", "2", "2.10", "0", "0.30"],
    ]
    assert "Dropped tokens" in section.text
    assert "How experts were used" not in page().sections
    with_capacity = page(steps=Steps(steps), expert_loads=loads, expert_drops=drops)
    assert with_capacity.sections["How experts were used"].rows[-2:] == [
        ["0", "0", "1.50", "1", "0.75", "0.250", "2", "0.500"],
        ["2", "2", "2.10", "0", "0.30", "0.125", "2", "0.125"],
    ]
    assert expert_shares({"layer_loads": {"x": [1], "1": [], "2": ["y"]}}, "layer_loads") == ()


# --- saves --------------------------------------------------------------------------------------

REPORTS = [
    SaveReport(10, 2_000_000_000, 0.5, 4.0),
    SaveReport(15, 2_000_000_000, 0.25, 1.0, "local"),
    SaveReport(15, 2_000_000_000, 0.0, 5.0, "upload"),
    SaveReport(20, 2_000_000_000, 0.7, 2.0),
]


def test_the_cost_of_saves_is_shown_by_kind() -> None:
    lines = "".join(json.dumps(report.document()) + "\n" for report in REPORTS)
    found = parse_saves(lines.encode(), "saves.jsonl")
    assert [(s.step, s.kind, s.size_bytes) for s in found] == [
        (report.step, report.kind, report.bytes) for report in REPORTS
    ]
    section = page(saves=found).sections["What saving cost"]
    assert "Training waited 1.4 s in all" in section.text
    assert section.rows[1:4] == [  # medians, then the longest
        ["in the run folder", "2", "2.00 GB", "0.750", "600 ms", "3.00 s", "4.00 s"],
        ["on nodes", "1", "2.00 GB", "2.00", "250 ms", "1.00 s", "1.00 s"],
        ["copied from nodes", "1", "2.00 GB", "0.400", "0 ms", "5.00 s", "5.00 s"],
    ]
    assert ["15", "", "250 ms"] in section.rows  # a row of the chart: no curve for uploads


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
def test_an_invalid_line_of_saves_is_refused_with_its_number(line: bytes) -> None:
    with pytest.raises(ArtifactError, match=r"saves\.jsonl: line 2 is not a save"):
        parse_saves(b"\n" + line, "saves.jsonl")


# --- goodput ------------------------------------------------------------------------------------

DOCUMENT = {
    "goodput": 0.75,
    "allocated_seconds": 400.0,
    "spent_seconds": {"queue": 100.0, "step": 300.0, "lost": 100.0, "idle": 0.0},
    "spent_percent": {"queue": 20.0, "step": 60.0, "lost": 20.0, "idle": 0.0},
    "attempts": [
        {
            **{"attempt": "a-<1>", "begin": 100.0, "end": 300.0, "ranks": 8, "from_step": 0},
            **{"last_step": 50, "spent": {"lost": 100.0}, "ended": "node failure"},
        },
        {"attempt": "b", "begin": 300.0, "end": 500.0, "ranks": None, "from_step": None},
    ],
}


def test_every_kind_of_time_has_a_label() -> None:
    assert [kind for kind, _, _ in GOODPUT_KINDS] == list(KINDS)


def test_shares_and_attempts_are_shown() -> None:
    section = page(goodput=DOCUMENT).sections["How much of it was training"]
    assert "Goodput 75.0 %: 2 attempts had all resources for 6 min 40 s" in section.text
    assert section.rows == [
        ["waiting in a queue", "", "1 min 40 s", "20.0%"],
        ["steps that were kept", "", "5 min", "60.0%"],
        ["steps that were lost", "", "1 min 40 s", "20.0%"],
        ["attempt", "allocated", "ranks", "steps", "lost", "ended"],
        ["a-<1>", "3 min 20 s", "8", "0 to 50", "1 min 40 s", "node failure"],
        ["b", "3 min 20 s", "", "", "", ""],
    ]


def test_one_attempt_has_no_table_of_attempts() -> None:
    attempt = {"attempt": "a", "begin": 0.0, "end": 1.0}
    document = {"spent_seconds": {"step": 1.0}, "attempts": [attempt]}
    section = page(goodput=document).sections["How much of it was training"]
    assert "Over one attempt." in section.text
    assert section.rows == [["steps that were kept", "", "1.0 s", ""]]


def test_the_goodput_document_is_optional(tmp_path: Path) -> None:
    file = tmp_path / "pretrain.json"
    assert read_goodput(None) is None
    assert read_goodput(str(file)) is None
    file.write_text(json.dumps(DOCUMENT))
    assert read_goodput(str(file)) == DOCUMENT
    file.write_text("[]")
    with pytest.raises(ArtifactError, match=r"pretrain\.json: not a goodput document"):
        read_goodput(str(file))


# --- without ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "facts",
    [
        {},
        {"goodput": {"spent_seconds": {"step": 0.0}}},
        {"saves": (Save(1, "by post", 1, 0.0, 1.0),)},
    ],
)
def test_a_card_without_facts_has_no_sections(facts: dict[str, Any]) -> None:
    assert list(page(**facts).sections) == [""]
