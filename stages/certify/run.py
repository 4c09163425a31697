"""Reads what a run published, proves it link by link, and prints the certificate."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import chain, repeat
from typing import Any

from stages.certify.config import CertifyConfig
from stages.certify.folder import CertifiedRun
from stages.certify.sample_order import DataUnavailable, SampleOrder, sample_order
from stages.certify.start_point import start_point
from stages.runtime.context import StageRun
from trainyard.artifacts import store
from trainyard.charts.text_table import text_table
from trainyard.config import flag
from trainyard.errors import ArtifactError
from trainyard.logging import one_line
from trainyard.training.certify.certificate import CHECKS, Certificate, listed
from trainyard.training.certify.proof import Prover
from trainyard.training.loop.ledger import FILE as LEDGER


def run(config: CertifyConfig, stage: StageRun) -> dict[str, Any]:
    """Print and write the certificate. Raises ArtifactError with the first broken link."""
    certificate = certify(config, stage)
    document = json.dumps(certificate.document(), indent=1, allow_nan=False)
    if config.output_file is not None:
        store.write_bytes(config.output_file, f"{document}\n".encode())
    print(document if config.json else table(certificate, config.run))
    link = certificate.first_broken_link
    if link is not None:
        raise ArtifactError(f"{config.run}: the first broken link: {link.text}")
    unchecked = [f"{c.name} ({c.reason})" for c in certificate.checks if c.reason]
    if config.complete and unchecked:
        raise ArtifactError(f"{config.run}: --complete: not checked: {listed(unchecked)}")
    return {}


def certify(config: CertifyConfig, stage: StageRun) -> Certificate:
    """The certificate of the run in a folder."""
    folder = CertifiedRun(config.run)
    facts = folder.facts()
    start = start_point(folder, folder.first_readable, config.load)
    samples: SampleOrder | None = None
    reason = ""
    try:
        samples = sample_order(config, folder, facts)
    except DataUnavailable as error:
        reason = str(error)
    prover = Prover(facts, start, samples, reason, config.check_every)
    with stage.progress(len(folder.steps), "checkpoints", "ledgers") as progress:
        for step in folder.steps:
            prover.add(folder.published(step))
            progress.update(1)
    whole = folder.whole_ledger()
    if whole is not None:
        prover.whole_ledger(whole, LEDGER)
    with stage.progress(folder.total_bytes(), "bytes", "files") as progress:
        files = folder.check_files(config.check_digests, progress)
    return prover.certificate(files, folder.remarks)


# --- as text ------------------------------------------------------------------------------------


def table(certificate: Certificate, url: str) -> str:
    """Facts, checks and the verdict as text for a terminal."""
    lines = [one_line(f"{name:<10} {value}") for name, value in _facts(certificate, url)]
    rows = [("result", "checked", "what", "")]
    for check in certificate.checks:
        notes = [f"first at step {check.broken.step}"] if check.broken else []
        notes += [check.reason] if check.reason else []
        note = f"({'; '.join(notes)})" if notes else ""
        what = f"{check.name}: {CHECKS[check.name]}"
        rows.append((check.result, f"{check.checked:,}", what, note))
    return "\n".join([*lines, "", *text_table(rows, (0, 2, 3)), "", one_line(certificate.sentence)])


def _facts(certificate: Certificate, url: str) -> Iterator[tuple[str, str]]:
    state = "finished" if certificate.finished else "not finished"
    yield "run", f"{url} (lineage {certificate.lineage[:12]}, {state})"
    saved = ", ".join(map(str, certificate.published_steps[-5:]))
    more = "..., " if len(certificate.published_steps) > 5 else ""
    steps = f"{certificate.first_step} to {certificate.last_step} of {certificate.of_steps}"
    yield "steps", f"{steps}; checkpoints: {more}{saved}"
    yield "begins at", certificate.begins_at
    yield "samples", f"{certificate.train_samples:,} ({certificate.tokens:,} tokens)"
    for name, span in zip(chain(["layouts"], repeat("")), certificate.spans, strict=False):
        ranks = "rank" if span.data_parallel_size == 1 else "ranks"
        yield (
            name,
            f"{span.data_parallel_size} data-parallel {ranks}, micro-batches of "
            f"{span.micro_batch_size}: steps {span.first_step} to {span.last_step}",
        )
    for name, change in zip(
        chain(["options"], repeat("")), certificate.course_changes, strict=False
    ):
        changed = ", ".join(f"{flag(key)} {value}" for key, value in change.options.items())
        yield name, f"from step {change.first_step} on: {changed or 'other rates'}"
    yield from zip(chain(["remarks"], repeat("")), certificate.remarks, strict=False)
