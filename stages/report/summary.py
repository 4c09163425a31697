"""The facts of a card that depend only on the contents of the artifacts: no times, no paths."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stages.report.facts import Card
from trainyard.charts.numbers import bounded_exp
from trainyard.charts.points import Point

FORMAT_VERSION = 1

CERTIFIED = ("verdict", "complete", "first_step", "last_step", "train_samples", "first_broken_link")


def summarize(card: Card, digests: Mapping[str, str], title: str) -> dict[str, Any]:
    """A JSON document that is the same in every run.

    digests: of each artifact, by the option that named it. title: as configured."""
    evaluation, certificate = card.evaluation or {}, card.certificate or {}
    document: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "title": title or None,
        "artifacts": dict(sorted(digests.items())),
        "parameters": card.num_parameters,
        "training": training(card),
        "certificate": _known({name: certificate.get(name) for name in CERTIFIED}),
        "evaluation": {k: v for k, v in evaluation.items() if k != "format_version"},
        "toxicity": None
        if card.toxicity is None
        else {
            "before": card.toxicity.before.get("scores"),
            "after": card.toxicity.after.get("scores"),
        },
        "samples": [
            {"prompt": s.prompt, "continuation": s.continuation, "finish_reason": s.finish_reason}
            for s in card.samples
        ],
    }
    return {key: value for key, value in document.items() if value not in (None, {}, [])}


def training(card: Card) -> dict[str, Any]:
    """Length and losses of the run."""
    if not card.steps:
        return {}
    first, last = card.validation or (None, None)
    return _known(
        {
            "steps": card.steps.last_step,
            "tokens": card.tokens,
            "loss": card.steps.last("loss"),
            "validation_before": first and _measured(first),
            "validation_after": last and _measured(last),
        }
    )


def _known(facts: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in facts.items() if value is not None}


def _measured(found: Point) -> dict[str, Any]:
    step, loss = found
    return {"step": step, "loss": loss, "perplexity": bounded_exp(loss)}
