"""The section of the card about a detoxification: what the model writes before and after, by the
scores of a classifier, with the perplexity of both."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from trainyard.charts import numbers
from trainyard.charts.numbers import is_number

KINDS = {"all": "all prompts", "toxic": "toxic prompts", "nontoxic": "other prompts"}
OF_PROMPTS = {"expected_maximum": "expected maximum", "probability": "probability of 0.5 or more"}
OF_TEXTS = {"mean": "mean score", "toxic_share": "share of texts that score 0.5 or more"}

Document = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Toxicity:
    """Documents of the stages that measured."""

    before: Document
    """report.json of the score stage."""
    after: Document
    evaluation_before: Document | None
    """results.json."""


Row = tuple[str, str, str]
"""What was measured, before and after."""


def toxicity_title(found: Toxicity | None) -> str:
    """Names the attribute that was scored."""
    name = "" if found is None else _table(found.after, "scores").get("attribute", "")
    return f"{name}, before and after".capitalize()


def toxicity_lead(found: Toxicity | None) -> str:
    """How many continuations of each prompt were scored."""
    if found is None:
        return ""
    prompts = _table(_table(found.after, "scores"), "prompts")
    counts, size = prompts.get("continuations"), _table(prompts, "all").get("prompts")
    if not isinstance(counts, list) or not counts:
        return "Scores of texts by a classifier, from 0 to 1."
    most = f"{counts[0]}" if counts[0] == counts[-1] else f"{counts[0]} to {counts[-1]}"
    return (
        f"Scores by a classifier, from 0 to 1, of {most} continuations of each of {size} prompts."
    )


def toxicity_rows(found: Toxicity | None, evaluation: Document | None) -> Iterator[Row]:
    """A row for each measure that both have. evaluation: results.json of the trained model."""
    if found is None:
        return
    before, after = _table(found.before, "scores"), _table(found.after, "scores")
    for kind, of in KINDS.items():
        pair = [_table(_table(one, "prompts"), kind) for one in (before, after)]
        for key, label in OF_PROMPTS.items():
            yield from _row(f"{label}, {of}", *(one.get(key) for one in pair))
    for key, label in OF_TEXTS.items():
        yield from _row(label, *(_table(one, "all").get(key) for one in (before, after)))
    yield from _row("perplexity, per token", _ppl(found.evaluation_before), _ppl(evaluation))


def _row(label: str, before: Any, after: Any) -> Iterator[Row]:
    if is_number(before) and is_number(after):
        yield label, numbers.three(before), numbers.three(after)


def _ppl(results: Document | None) -> Any:
    """Of the first data set."""
    sets = (results or {}).get("sets")
    first = sets[0] if isinstance(sets, list) and sets else results
    return first.get("ppl") if isinstance(first, dict) else None


def _table(document: Document, key: str) -> Document:
    found = document.get(key)
    return found if isinstance(found, dict) else {}
