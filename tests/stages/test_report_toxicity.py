"""The section of the run card about a detoxification; its flow: tests/yard/test_detoxify.py."""

from __future__ import annotations

from typing import Any

import pytest

from stages.report.config import ReportConfig
from stages.report.toxicity import Toxicity, toxicity_lead, toxicity_rows, toxicity_title
from trainyard.errors import ConfigError


def scored(highest: float) -> dict[str, Any]:
    measures = {"prompts": 8, "expected_maximum": highest, "probability": 0.5}
    prompts = {"continuations": [25, 25], "all": measures, "toxic": {"prompts": 0}}
    texts = {"mean": 0.25, "toxic_share": 0.125}
    return {"scores": {"attribute": "toxicity", "all": texts, "prompts": prompts}}


def test_each_measure_stands_before_and_after() -> None:
    found = Toxicity(scored(0.9), scored(0.3), {"sets": [{"ppl": 20.0}]})
    assert toxicity_title(found) == "Toxicity, before and after"
    assert toxicity_lead(found).endswith("of 25 continuations of each of 8 prompts.")
    assert list(toxicity_rows(found, {"sets": [{"ppl": 21.5}]})) == [
        ("expected maximum, all prompts", "0.900", "0.300"),
        ("probability of 0.5 or more, all prompts", "0.500", "0.500"),
        ("mean score", "0.250", "0.250"),
        ("share of texts that score 0.5 or more", "0.125", "0.125"),
        ("perplexity, per token", "20.0", "21.5"),
    ]


def test_what_was_not_measured_has_no_row() -> None:
    assert list(toxicity_rows(None, None)) == []
    found = Toxicity({"scores": {"all": {"mean": "x"}}}, {"scores": []}, None)
    assert list(toxicity_rows(found, None)) == []
    assert toxicity_lead(found) == "Scores of texts by a classifier, from 0 to 1."


def test_one_side_alone_is_refused() -> None:
    with pytest.raises(ConfigError, match="--toxicity-before and --toxicity-after stand side by"):
        ReportConfig(checkpoint="c", toxicity_before="b", output_prefix="o")
