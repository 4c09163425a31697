"""Fingerprint all units, decide, and write what stays and what goes."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

from stages.dedup.config import DedupConfig
from stages.dedup.decide import Decisions, decide
from stages.dedup.fingerprint import fingerprint_unit, name_of, pieces, spans_of
from stages.runtime.context import StageRun
from stages.runtime.document_units import (
    DOCUMENTS,
    DROPPED,
    UnitDone,
    UnitJob,
    plan_jobs,
    reader_of,
    run_first_pass,
    run_units,
)
from stages.runtime.unit_files import UnitFiles
from stages.runtime.unit_shares import (
    FilesOfShares,
    run_share,
)
from trainyard.collection.documents import Item, dropped
from trainyard.collection.duplicates.clusters import EXACT, NEAR
from trainyard.collection.tally import Tally
from trainyard.errors import DataError

log = logging.getLogger(__name__)

REPORT = "report.json"
LINES = "lines"
DECISIONS = "decisions"


def run(config: DedupConfig, stage: StageRun) -> dict[str, Any]:
    """Write the documents that stay and those that others stand for; with --rank, fingerprints."""
    began = time.monotonic()
    jobs = plan_jobs(stage, config)
    if config.rank is not None:
        run_share(
            stage,
            jobs,
            fingerprint_unit,
            config.workers,
            "fingerprint",
            lambda job: (name_of(job),),
        )
        return {"units": len(jobs)}
    if config.world_size is None:
        found = run_first_pass(
            *(stage, jobs, fingerprint_unit, config.workers, "fingerprint", "fingerprints")
        )
        files = [[file] for file in found]
    else:
        files = FilesOfShares(stage, config.all_shares(), "dedup").of_pieces(jobs, name_of)
    folder = stage.scratch / DECISIONS
    folder.mkdir()
    clusters = decide(config, stage, files, folder)
    whole = Tally.of(())
    for one in run_units(stage, jobs, write_unit, config.workers, "write"):
        whole.add(Tally.parse(one), config.documents.num_samples)
    stage.write_json(REPORT, {**whole.document(), "clusters": clusters})
    log.info(
        "deduplicated documents=%d kept=%d clusters=%d seconds=%.2f",
        *(whole.documents, whole.kept, clusters, time.monotonic() - began),
    )
    return {**whole.metrics(), "clusters": clusters}


def write_unit(job: UnitJob) -> UnitDone:
    """Write the documents of a unit as was decided, in a worker."""
    config: DedupConfig = job.config
    decided = Decisions.read(Path(job.scratch, DECISIONS, f"{job.number:05d}.json"))
    writer = _Writer(config, decided)
    reader = reader_of(job)
    with UnitFiles(job) as files:
        number = -1
        for number, item in enumerate(reader.items()):
            fields, is_kept = writer.decide(number, item)
            files.write(DOCUMENTS if is_kept else DROPPED, fields)
        if number + 1 != decided.count:
            raise DataError(
                f"{job.unit.sources[0].url}: had {decided.count} documents when they were "
                f"fingerprinted, and {number + 1} now: a file was changed; run again"
            )
        files.write_bad(reader.bad)
    writer.tally.bad_lines = len(reader.bad)
    return UnitDone(files.records, writer.tally.document())


class _Writer:
    """Applies decisions and counts."""

    def __init__(self, config: DedupConfig, decided: Decisions) -> None:
        self._key, self._kind = config.documents.json_key, config.lines
        self._num_samples = config.documents.num_samples
        self._spans = spans_of(config) if config.lines == "words" else None
        self._decided = decided
        self.tally = Tally.of([EXACT, NEAR, LINES])

    def decide(self, number: int, item: Item) -> tuple[dict[str, Any], bool]:
        """The document to write, and whether it stays."""
        tally, given = self.tally, str(item.fields[self._key])
        tally.documents += 1
        tally.chars += len(given)
        if number in self._decided.drops:
            drop = self._decided.drops[number]
            why = f"as {drop['kept']['file']}:{drop['kept']['offset']}"
            return self._dropped(item, drop["rule"], why, given, drop), False
        text = self._cut(item, given, set(self._decided.cuts.get(number, ())))
        if given.strip() and not text.strip():
            return self._dropped(item, LINES, "every line is in other documents", given, {}), False
        tally.kept += 1
        tally.kept_chars += len(text)
        item.fields[self._key] = text
        return item.fields, True

    def _dropped(
        self, item: Item, rule: str, why: str, text: str, more: dict[str, Any]
    ) -> dict[str, Any]:
        reason = self.tally.reasons[rule]
        reason.dropped += 1
        reason.dropped_chars += len(text)
        reason.sample(self._num_samples, item.place, why, text)
        rest = {name: value for name, value in more.items() if name != "rule"}
        return dropped(item.fields, rule, why, **rest)

    def _cut(self, item: Item, text: str, lines: set[int]) -> str:
        if not lines:
            return text
        kept, removed = self._without(text, lines)
        reason = self.tally.reasons[LINES]
        reason.changed += 1
        reason.removed_lines += len(removed)
        reason.removed_chars += len(text) - len(kept)
        what = "a run of words cut" if self._spans is not None else "a line cut"
        reason.sample(self._num_samples, item.place, what, removed[0])
        return kept

    def _without(self, text: str, lines: set[int]) -> tuple[str, list[str]]:
        """The text without these lines or runs, and what was cut."""
        if self._spans is not None:
            return self._spans.cut(text, sorted(lines))
        parts = pieces(text, self._kind)
        kept = [
            "".join(parts[2 * i : 2 * i + 2])
            for i in range((len(parts) + 1) // 2)
            if i not in lines
        ]
        return "".join(kept), [parts[2 * i] for i in sorted(lines)]
