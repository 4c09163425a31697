"""Reads the artifacts, and writes the card and its summary."""

from __future__ import annotations

from typing import Any

from stages.report.card import render
from stages.report.collect import gather
from stages.report.config import ReportConfig
from stages.report.summary import summarize, training
from stages.runtime.context import StageRun

PAGE = ".html"
SUMMARY = ".summary.json"


def run(config: ReportConfig, stage: StageRun) -> dict[str, Any]:
    """Write the card and its summary; returns parameters, losses and speed."""
    card = gather(config)
    digests = {name: found.digest for name, found in stage.inputs.items()}
    stage.write_json(SUMMARY, summarize(card, digests, config.title))
    stage.write_text(PAGE, render(card), volatile=True)
    assert stage.output is not None
    print(stage.output.file_url(PAGE))
    speed = card.training_speed
    rate = {} if speed is None else {"tokens_per_second": speed}
    return {"parameters": card.num_parameters, **training(card), **rate}
