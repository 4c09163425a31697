"""Count n-grams, ignore the common ones, and remove the others from the documents."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson

from stages.decontaminate.config import DecontaminateConfig
from stages.decontaminate.count import (
    SPLIT_ID,
    Counts,
    count_unit,
    is_skimmed,
    name_of,
    tasks_of,
    used_matcher_of,
    write_common,
    write_ngrams,
)
from stages.decontaminate.verbatim import Added, blocks_of
from stages.runtime.context import StageRun
from stages.runtime.document_units import (
    DOCUMENTS,
    DROPPED,
    UnitDone,
    UnitFile,
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
from trainyard.artifacts.strict_json import parse_json
from trainyard.collection.contamination.ngrams import task_ngrams
from trainyard.collection.contamination.split import clean_pieces
from trainyard.collection.contamination.tasks import read_task
from trainyard.collection.documents import Item, dropped
from trainyard.collection.tally import Tally
from trainyard.corpus.workers import check_stop
from trainyard.errors import ArtifactError, DataError
from trainyard.machine import available_cores

log = logging.getLogger(__name__)

REPORT = "report.json"
USED = "used"
CONTAMINATED, SPLIT, NOTHING_LEFT, PIECES = "contaminated", "split", "nothing_left", "splits_count"
SHOWN = 100
"""Common n-grams in the report."""


def run(config: DecontaminateConfig, stage: StageRun) -> dict[str, Any]:
    """Write the documents without n-grams of the tasks; with --rank, counts of a share."""
    began = time.monotonic()
    tasks = {
        name: task_ngrams(
            read_task(name, stage.inputs[f"task.{name}"].files),
            config.min_ngram_size,
            config.max_ngram_size,
        )
        for name in config.tasks
    }
    _refuse_empty(config, tasks)
    jobs = plan_jobs(stage, config)
    size_bytes = sum(job.size_bytes for job in jobs)
    write_ngrams(stage.scratch, tasks, size_bytes, config.workers or available_cores())
    how = (count_unit, config.workers, "count")
    in_threads = is_skimmed(str(stage.scratch))  # compiled code runs without Python's lock
    if config.rank is not None:
        run_share(stage, jobs, *how, lambda job: (name_of(job),), in_threads)
        return {"units": len(jobs)}
    if config.world_size is None:
        counted = run_first_pass(stage, jobs, *how, "counts", in_threads)
        files = [[file] for file in counted]
    else:
        files = FilesOfShares(stage, config.all_shares(), "decontaminate").of_pieces(jobs, name_of)
    counts = [Counts.of_pieces(map(_read_counts, own)) for own in files]
    total: Counter[str] = Counter()
    for before, one in zip([None, *counts], counts, strict=False):
        one.first = before.first + before.documents if before else 0
        total.update(one.counts)
    limit = config.key_threshold
    common = sorted(ngram for ngram, count in total.items() if limit and count >= limit)
    write_common(stage.scratch, common)
    _write_used(stage.scratch / USED, counts)
    found = run_units(stage, jobs, write_unit, config.workers, "write", None, in_threads)
    metrics = _report(config, stage, tasks, total, common, found)
    log.info(
        "decontaminated documents=%d kept=%d seconds=%.2f",
        *(metrics["documents"], metrics["kept_documents"], time.monotonic() - began),
    )
    return metrics


def _refuse_empty(config: DecontaminateConfig, tasks: dict[str, dict[str, None]]) -> None:
    for name, ngrams in tasks.items():
        if not ngrams:
            place = config.task_data[config.tasks.index(name)]
            raise DataError(
                f"--tasks {name}: no text of {place} has {config.min_ngram_size} words, so there "
                "is nothing to look for; lower --min-ngram-size or leave the task out"
            )


def _read_counts(file: UnitFile) -> Counts:
    try:
        return Counts(**parse_json(file.read(), file.url))
    except TypeError as error:
        raise ArtifactError(f"{file.url}: not the counts of a unit ({error}); remove it") from error


def _write_used(folder: Path, counts: Sequence[Counts]) -> None:
    folder.mkdir()
    for number, one in enumerate(counts):
        (folder / f"{number:05d}.json").write_bytes(orjson.dumps({**asdict(one), "counts": {}}))


def _report(
    config: DecontaminateConfig,
    stage: StageRun,
    tasks: dict[str, dict[str, None]],
    total: Counter[str],
    common: list[str],
    found: Sequence[dict[str, Any]],
) -> dict[str, Any]:
    whole = Tally.of(())
    documents: Counter[str] = Counter()
    for one in found:
        documents.update(one.pop("tasks"))
        whole.add(Tally.parse(one), config.documents.num_samples)
    occurrences: Counter[str] = Counter()
    for ngram, count in total.items():
        occurrences.update({name: count for name, ngrams in tasks.items() if ngram in ngrams})
    by_task = {
        name: {
            "ngrams": len(ngrams),
            "occurrences": occurrences[name],
            "documents": documents[name],
        }
        for name, ngrams in tasks.items()
    }
    shown = sorted(common, key=lambda ngram: (-total[ngram], ngram))[:SHOWN]
    document = {
        **whole.document(),
        "tasks": by_task,
        "common_ngrams": {ngram: total[ngram] for ngram in shown},
    }
    stage.write_json(REPORT, document)
    return {**whole.metrics(), "tasks": by_task, "common_ngrams": len(common)}


def write_unit(job: UnitJob) -> UnitDone:
    """Write what is left of the documents of a unit, in a worker."""
    path = Path(job.scratch, USED, f"{job.number:05d}.json")
    writer = _Writer(job, Counts(**orjson.loads(path.read_bytes())))
    with UnitFiles(job) as files:
        if writer.counts.has_origin is None:
            number = writer.write_items(files)
        else:
            number = writer.write_lines(files, writer.counts.has_origin)
        if number != writer.counts.documents:
            raise DataError(
                f"{job.unit.sources[0].url}: had {writer.counts.documents} documents when they "
                f"were counted, and {number} now: a file was changed; run again"
            )
    return UnitDone(files.records, {**writer.tally.document(), "tasks": dict(writer.documents)})


class _Writer:
    """Decides about documents and counts."""

    def __init__(self, job: UnitJob, counts: Counts) -> None:
        self._job, self.counts = job, counts
        self._config: DecontaminateConfig = job.config
        self._hits = frozenset(counts.hits)
        self.tally = Tally.of([CONTAMINATED, SPLIT, NOTHING_LEFT, PIECES])
        self.documents: Counter[str] = Counter()

    def write_items(self, files: UnitFiles) -> int:
        """Write what is left of documents that are read one by one; their number."""
        number = -1
        reader = reader_of(self._job)
        for number, item in enumerate(reader.items()):
            check_stop()
            for kind, fields in self.decide(number, item):
                files.write(kind, fields)
        files.write_bad(reader.bad)
        self.tally.bad_lines = len(reader.bad)
        return number + 1

    def write_lines(self, files: UnitFiles, has_origin: bool) -> int:
        """The same, where only documents with n-grams are read."""
        name = None if self._config.mode == "drop" else self._split_name()
        added = Added(has_origin, name, self.counts.first + 1, is_skimmed(self._job.scratch))
        number = 0
        for block in blocks_of(self._job):
            check_stop()
            begin = 0
            for at in block.chosen(self.counts.hits):
                files.write_lines(DOCUMENTS, added.lines(block, begin, at))
                for kind, fields in self.decide(block.first + at, block.item(at)):
                    files.write(kind, fields)
                begin = at + 1
            files.write_lines(DOCUMENTS, added.lines(block, begin, len(block)))
            number = block.first + len(block)
        unread = self.counts.documents - self.tally.documents
        chars = self.counts.chars - self.tally.chars
        self.tally.documents += unread
        self.tally.kept += unread
        self.tally.chars += chars
        self.tally.kept_chars += chars
        return number

    def decide(self, number: int, item: Item) -> list[tuple[str, dict[str, Any]]]:
        """What to write of a document: (kind of file, document)."""
        config, key = self._config, self._config.documents.json_key
        given = str(item.fields[key])
        self.tally.documents += 1
        self.tally.chars += len(given)
        pieces: list[str] = [given]
        found: list[str] = []
        if number in self._hits:
            sides = (config.remove_char_each_side, config.filter_text_char_len)
            matcher = used_matcher_of(self._job.scratch)
            pieces, found = clean_pieces(given, matcher, *sides)
        if not found:
            return self._kept(number, item, pieces)
        by_task = tasks_of(self._job.scratch)
        tasks = sorted(
            name for name, ngrams in by_task.items() if not ngrams.keys().isdisjoint(found)
        )
        self.documents.update(tasks)
        rule = SPLIT
        if config.mode == "drop":
            rule, pieces = CONTAMINATED, []
        elif not pieces:
            rule = NOTHING_LEFT
        elif len(pieces) > config.splits_count:
            rule, pieces = PIECES, []
        reason = self.tally.reasons[rule]
        left = sum(map(len, pieces))
        reason.dropped += not pieces
        reason.dropped_chars += 0 if pieces else len(given)
        reason.changed += bool(pieces)
        reason.removed_chars += len(given) - left if pieces else 0
        why = f"{' '.join(tasks)}: {found[0]}"
        reason.sample(config.documents.num_samples, item.place, why, given)
        away = dropped(item.fields, rule, why, tasks=tasks, ngrams=len(found), pieces=len(pieces))
        return [(DROPPED, away), *self._kept(number, item, pieces)]

    def _kept(
        self, number: int, item: Item, pieces: Sequence[str]
    ) -> list[tuple[str, dict[str, Any]]]:
        config = self._config
        self.tally.kept += bool(pieces)
        self.tally.kept_chars += sum(map(len, pieces))
        if config.mode == "drop":
            return [(DOCUMENTS, item.fields) for _ in pieces]
        earlier = item.fields.get(SPLIT_ID)
        prefix = f"{earlier}-" if earlier is not None else ""
        name = f"{prefix}{self._split_name()}-{self.counts.first + number + 1:010d}"
        key = config.documents.json_key
        return [
            (DOCUMENTS, {**item.fields, key: piece, SPLIT_ID: f"{name}-{i:04d}"})
            for i, piece in enumerate(pieces)
        ]

    def _split_name(self) -> str:
        """Begins the values of `split_id`."""
        return "-".join(self._config.tasks)
