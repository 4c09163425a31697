"""The facts of a card that depend on the artifacts' contents alone: the same wherever, whenever."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from stages.report.certificate import verdict
from stages.report.facts import Card, Step

FORMAT_VERSION = 1


def summarize(card: Card, digests: Mapping[str, str], title: str) -> dict[str, Any]:
    """A JSON-able document without times, places or anything a second run could change.

    digests: of each artifact by the option that named it. title: as configured."""
    document: dict[str, Any] = {"format_version": FORMAT_VERSION}
    if title:
        document["title"] = title
    document["artifacts"] = {name: digests[name] for name in sorted(digests)}
    document["parameters"] = card.num_parameters
    document["training"] = training(card)
    document["certificate"] = verdict(card)
    evaluation = card.evaluation or {}
    document["evaluation"] = {
        key: value for key, value in evaluation.items() if key != "format_version"
    }
    document["samples"] = [
        {"prompt": s.prompt, "continuation": s.continuation, "finish_reason": s.finish_reason}
        for s in card.samples
    ]
    return {key: value for key, value in document.items() if value not in (None, {}, [])}


def training(card: Card) -> dict[str, Any]:
    """Length and losses of the run."""
    if not card.steps:
        return {}
    trained = [step for step in card.steps if step.loss is not None]
    facts: dict[str, Any] = {"steps": card.steps[-1].step, "tokens": card.tokens}
    facts["loss"] = trained[-1].loss if trained else None
    if card.validation:
        first, last = card.validation
        facts["validation_before"], facts["validation_after"] = _measured(first), _measured(last)
    return {key: value for key, value in facts.items() if value is not None}


def _measured(step: Step) -> dict[str, Any]:
    loss = step.validation_loss or 0.0
    return {"step": step.step, "loss": loss, "perplexity": math.exp(min(loss, 20.0))}
