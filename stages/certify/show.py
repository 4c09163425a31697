"""A certificate as a table for people."""

from __future__ import annotations

from collections.abc import Iterator

from trainyard.logging import one_line
from trainyard.training.certify.certificate import CHECKS, Certificate

HEADINGS = ("result", "checked", "what", "")


def table(certificate: Certificate, url: str) -> str:
    """Facts, checks, the verdict."""
    lines = [f"{name:<10} {value}" for name, value in _facts(certificate, url)]
    rows = [HEADINGS]
    for check in certificate.checks:
        at = [] if check.broken is None else [f"first at step {check.broken.step}"]
        notes = [*at, *([check.reason] if check.reason else [])]
        note = f"({'; '.join(notes)})" if notes else ""
        rows.append(
            (check.result, f"{check.checked:,}", f"{check.name}: {CHECKS[check.name]}", note)
        )
    widths = [max(len(row[k]) for row in rows) for k in range(3)]
    lines.append("")
    for result, checked, what, note in rows:
        text = f"{result:<{widths[0]}}  {checked:>{widths[1]}}  {what:<{widths[2]}}  {note}"
        lines.append(text.rstrip())
    return "\n".join(map(one_line, [*lines, "", certificate.sentence]))


def _facts(certificate: Certificate, url: str) -> Iterator[tuple[str, str]]:
    state = "finished" if certificate.finished else "not finished"
    yield "run", f"{url} (lineage {certificate.lineage[:12]}, {state})"
    last, whole = certificate.last_step, certificate.of_steps
    saved = ", ".join(map(str, certificate.published_steps[-5:]))
    more = "..., " if len(certificate.published_steps) > 5 else ""
    yield "steps", f"{certificate.first_step} to {last} of {whole}; checkpoints: {more}{saved}"
    yield "begins at", certificate.begins_at
    yield "samples", f"{certificate.train_samples:,} ({certificate.tokens:,} tokens)"
    for name, span in zip(_first_only("taken on"), certificate.spans, strict=False):
        ranks = "rank" if span.data_parallel_size == 1 else "ranks"
        yield (
            name,
            f"{span.data_parallel_size} data-parallel {ranks}, micro-batches of "
            f"{span.micro_batch_size}: steps {span.first_step} to {span.last_step}",
        )
    for name, remark in zip(_first_only("besides"), certificate.remarks, strict=False):
        yield name, remark


def _first_only(name: str) -> Iterator[str]:
    yield name
    while True:
        yield ""
