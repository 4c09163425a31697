"""Read what a run published, prove it link by link, and say what came of it."""

from __future__ import annotations

import json
from typing import Any

from stages.certify.beginning import beginning_of
from stages.certify.config import CertifyConfig
from stages.certify.folder import RunFolder
from stages.certify.order import NotAtHand, SampleOrder, sample_order
from stages.certify.show import table
from stages.runtime.context import StageRun
from trainyard.artifacts import store
from trainyard.errors import ArtifactError
from trainyard.training.certify.certificate import Certificate, listed
from trainyard.training.certify.proof import Prover
from trainyard.training.loop.ledger import FILE as LEDGER
from trainyard.training.run.run_record import RunRecord


def run(config: CertifyConfig, stage: StageRun) -> dict[str, Any]:
    """Print and write the certificate; ArtifactError with the first broken link, if there is
    one."""
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
    """What is known of the run in a folder."""
    folder = RunFolder(config.run)
    facts = folder.facts()
    beginning = beginning_of(folder, folder.first_told, config.load)
    samples, why_not = _samples(config, folder, facts)
    prover = Prover(facts, beginning, samples, why_not, config.check_every)
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


def _samples(
    config: CertifyConfig, folder: RunFolder, facts: RunRecord
) -> tuple[SampleOrder | None, str]:
    try:
        return sample_order(config, folder, facts), ""
    except NotAtHand as reason:
        return None, str(reason)
