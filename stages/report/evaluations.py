"""The evaluation on the card: for each data set its figures with standard errors, and its
passport."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from trainyard.artifacts.digest import SHORT
from trainyard.charts import numbers
from trainyard.charts.numbers import is_number, three, whole

LABELS = {
    "ppl": ("perplexity, per token", numbers.perplexity),
    "adjusted_ppl": ("adjusted perplexity, per word", numbers.perplexity),
    "avg_loss": ("loss, nats per token", numbers.fixed(4)),
    "bits_per_byte": ("bits per byte", numbers.fixed(3)),
    "token_ratio": ("tokens per word", numbers.fixed(3)),
    "num_tokens": ("tokens scored", whole),
    "accuracy": ("accuracy", numbers.fixed(4)),
    "accuracy_norm": ("accuracy, by bytes", numbers.fixed(4)),
    "target_ppl": ("perplexity of the last word", numbers.perplexity),
    "exact_match": ("exact match, share of the answers", numbers.fixed(3)),
    "f1": ("F1, words of the answers", numbers.fixed(3)),
    "num_questions": ("questions answered", whole),
    "num_examples": ("examples", whole),
}
"""Results with a label; others are shown under their own names."""

APART = ("format_version", "task", "step", "sets", "name", "rows", "passport")


@dataclass(frozen=True, slots=True)
class EvaluatedSet:
    """The results of one data set as the page shows them."""

    heading: str
    figures: list[tuple[str, str]]
    """Label and text; with a standard error, `0.412 +- 0.007`."""
    others: list[tuple[str, Any]]
    passport: list[tuple[str, str]]


def evaluated_sets(document: Mapping[str, Any] | None, text: str) -> list[EvaluatedSet]:
    """What `results.json` says of each data set. text: its name where the document has none, as in
    results from before there were passports."""
    if not document:
        return []
    listed = document.get("sets")
    found = listed if isinstance(listed, list) else []
    sets: list[Mapping[str, Any]] = [one for one in found if isinstance(one, dict)]
    return [_shown(one, document.get("task"), text) for one in sets or [document]]


def _shown(results: Mapping[str, Any], task: Any, text: str) -> EvaluatedSet:
    name = results.get("name") if isinstance(results.get("name"), str) else text
    protocol = f", by the protocol of {task}" if task else ""
    return EvaluatedSet(
        heading=f"Evaluation of {name or 'a text'}{protocol}",
        figures=list(_figures(results)),
        others=[(k, v) for k, v in results.items() if k not in LABELS and k not in APART],
        passport=list(_passport(_table(results, "passport"))),
    )


def _figures(results: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    errors = _table(_table(results, "passport"), "figures")
    for key, (label, shown) in LABELS.items():
        value = results.get(key)
        if not is_number(value):
            continue
        stderr = _table(errors, key).get("stderr")
        spread = f" \N{PLUS-MINUS SIGN} {three(stderr)}" if is_number(stderr) else ""
        yield label, f"{shown(value)}{spread}"


def _passport(passport: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Rows of the passport; digests are cut as everywhere on the page."""
    for part in ("protocol", "data", "checkpoint", "tokenizer", "code"):
        table = _table(passport, part)
        words = [str(table[key]) for key in ("name", "type", "version") if key in table]
        if digest := table.get("digest"):
            words.append(str(digest)[:SHORT])
        if is_number(table.get("examples")):
            words.append(f"{whole(table['examples'])} examples")
        if words:
            yield part, " \N{MIDDLE DOT} ".join(words)
    found = _table(passport, "contamination")
    if found:
        of = f"{found.get('num_contaminated')} of {found.get('num_examples')} examples"
        yield "contamination", f"{of} share {found.get('ngram')} tokens in a row with the corpus"


def _table(document: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = document.get(key)
    return found if isinstance(found, dict) else {}
