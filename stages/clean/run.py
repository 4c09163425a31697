"""Clean the units that are not done yet, and report what each rule did."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import Any

from stages.clean.config import CleanConfig
from stages.runtime.context import StageRun
from stages.runtime.document_units import (
    DOCUMENTS,
    DROPPED,
    UnitDone,
    UnitJob,
    plan_jobs,
    reader_of,
    run_units,
)
from stages.runtime.unit_files import UnitFiles
from stages.runtime.unit_shares import (
    join_units,
    read_tally,
    run_share,
)
from trainyard.collection.clean import Cleaner
from trainyard.collection.counting import token_counter
from trainyard.collection.rules.build import Rule, build_rule
from trainyard.collection.rules.table import named
from trainyard.collection.tally import Tally

log = logging.getLogger(__name__)

REPORT = "report.json"


def run(config: CleanConfig, stage: StageRun) -> dict[str, Any]:
    """Write the documents that the rules keep and those that they drop, or a share of them."""
    began = time.monotonic()
    build_rules(config)  # raises its errors before any work
    token_counter(config.tokenizer())
    if config.world_size is not None and config.rank is None:
        shares = config.all_shares()
        manifests = join_units(stage, shares, "clean")
        tallies = [
            read_tally(share.file_url(REPORT), manifest)
            for share, manifest in zip(shares, manifests, strict=True)
        ]
    else:
        jobs = plan_jobs(stage, config)
        run = run_units if config.rank is None else run_share
        found = run(stage, jobs, clean_unit, config.workers, "clean")
        tallies = [Tally.parse(one) for one in found]
    whole = Tally.of(())
    for tally in tallies:
        whole.add(tally, config.documents.num_samples)
    stage.write_json(REPORT, whole.document())
    if whole.documents and not whole.kept and config.rank is None:
        log.warning("the rules drop every document; %s says which rule dropped how many", REPORT)
    log.info(
        "cleaned documents=%d kept=%d seconds=%.2f million_chars_per_second=%.2f",
        *(whole.documents, whole.kept, time.monotonic() - began),
        whole.chars / 1e6 / max(time.monotonic() - began, 1e-9),
    )
    return whole.metrics()


def build_rules(config: CleanConfig) -> list[Rule]:
    """The rules, with the names that they have in the report."""
    specs = config.rule_specs()
    pairs = zip(specs, named(specs), strict=True)
    return [replace(build_rule(spec), written=name) for spec, name in pairs]


def clean_unit(job: UnitJob) -> UnitDone:
    """Clean one unit, in a worker."""
    config: CleanConfig = job.config
    documents = config.documents
    reader = reader_of(job)
    cleaner = Cleaner(
        build_rules(config),
        documents.json_key,
        documents.num_samples,
        token_counter(config.tokenizer()),
    )
    with UnitFiles(job) as files:
        for item in reader.items():
            fields, is_kept = cleaner.clean(item)
            files.write(DOCUMENTS if is_kept else DROPPED, fields)
        files.write_bad(reader.bad)
    cleaner.tally.bad_lines = len(reader.bad)
    return UnitDone(files.records, cleaner.tally.document(), reader.digests)
