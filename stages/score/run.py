"""Score all units, decide which documents stay, and write them with their scores."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from stages.runtime.context import StageRun
from stages.runtime.document_units import (
    DOCUMENTS,
    DROPPED,
    UnitDone,
    UnitFile,
    UnitFiles,
    UnitJob,
    files_of_shares,
    plan_jobs,
    reader_of,
    run_first_pass,
    run_units,
)
from stages.score.config import ANNOTATED, NGRAMS, ScoreConfig
from stages.score.prompts import read_toxicity
from stages.score.scores import (
    SCORE,
    WEIGHTS,
    UnitScores,
    attributes_of,
    name_of,
    score_unit,
    scorer_of,
)
from trainyard import json_text
from trainyard.artifacts.digest import digest_bytes
from trainyard.classifiers.examples import read_examples, train_classifier
from trainyard.classifiers.toxicity import Score, by_prompt, lowest, of_prompts, summarize
from trainyard.collection.documents import Item, dropped, dropped_line
from trainyard.collection.tally import Tally
from trainyard.errors import ArtifactError, DataError

log = logging.getLogger(__name__)

REPORT = "report.json"
DECISIONS = "decisions"
RULE = "keep_fraction"


def run(config: ScoreConfig, stage: StageRun) -> dict[str, Any]:
    """Write the documents that stay and the others, all with scores; with --rank, scores alone."""
    began = time.monotonic()
    toxicity = {} if config.prompt_path is None else read_toxicity(config.prompt_path)
    jobs = plan_jobs(stage, config)
    if config.rank is not None:
        trained = prepare(config, stage)
        run_units(*(stage, jobs, score_unit, config.workers, "score"), lambda job: (name_of(job),))
        stage.write_json(report_of(config.rank), trained)
        return {"units": len(jobs)}
    if config.world_size is not None:
        trained, files = _join(config, stage, jobs)
    else:
        trained, files = prepare(config, stage), _make(config, stage, jobs)
    units = [UnitScores.parse(file.read(), file.url) for file in files]
    measured = measure(config, units, toxicity)
    _decide(config, stage.scratch / DECISIONS, units)
    whole = Tally.of([RULE] if config.keep_fraction is not None else [])
    for one in run_units(stage, jobs, write_unit, config.workers, "write"):
        whole.add(Tally.parse(one), config.documents.num_samples)
    found = {**({"classifier": trained} if trained else {}), "scores": measured}
    stage.write_json(REPORT, {**whole.document(), **found})
    log.info(
        "scored documents=%d kept=%d seconds=%.2f",
        *(whole.documents, whole.kept, time.monotonic() - began),
    )
    return {**whole.metrics(), **found}


def prepare(config: ScoreConfig, stage: StageRun) -> dict[str, Any]:
    """Train or try the classifier before any work; how it does on held-out examples, and the
    digest of its weights."""
    if config.classifier == ANNOTATED:
        return {}
    if config.classifier != NGRAMS:
        scorer_of(config.classifier, "")
        return {}
    assert config.classifier_data is not None, "the options see to it"
    classifier, measured = train_classifier(read_examples(config.classifier_data))
    np.save(stage.scratch / WEIGHTS, classifier.weights)
    log.info(
        "trained the classifier examples=%d held_out=%d accuracy=%s area_under_roc=%s",
        *(measured[k] for k in ("trained_on", "held_out", "accuracy", "area_under_roc")),
    )
    return {**measured, "weights": digest_bytes(classifier.weights.tobytes())}


def report_of(rank: int) -> str:
    """The file of a share that says which classifier it trained."""
    return f"classifier-{rank:05d}.json"


def _join(
    config: ScoreConfig, stage: StageRun, jobs: Sequence[UnitJob]
) -> tuple[dict[str, Any], list[UnitFile]]:
    """The classifier of all shares, and their scores. ArtifactError if each trained its own: the
    same examples give other weights on another kind of machine."""
    shares = config.all_shares()
    reports = [report_of(rank) for rank in range(len(shares))]
    files = files_of_shares(stage, shares, "score", [*reports, *map(name_of, jobs)])
    trained = [json_text.loads(file.read()) for file in files[: len(shares)]]
    for share, one in zip(shares, trained, strict=True):
        if one != trained[0]:
            raise ArtifactError(
                f"{share.url}: trained other weights than {shares[0].url}, so their scores do not "
                f"compare; remove {config.shares_url} and make all on one kind of machine"
            )
    return trained[0], files[len(shares) :]


def _make(config: ScoreConfig, stage: StageRun, jobs: Sequence[UnitJob]) -> list[UnitFile]:
    """Scores in the work folder."""
    folder = stage.work.url("scores")
    own = [replace(job, folder=folder) for job in jobs]
    return run_first_pass(stage, own, score_unit, config.workers, "score")


def measure(
    config: ScoreConfig, units: Sequence[UnitScores], toxicity: Mapping[str, float]
) -> dict[str, Any]:
    """What the report says about the scores of all documents. DataError if none of them stays, and
    for prompts that are not those that the texts continue."""
    scores = list(chain.from_iterable(unit.scores for unit in units))
    prompts = list(chain.from_iterable(unit.prompts for unit in units))
    found: dict[str, Any] = {"attribute": config.attribute, "all": summarize(scores)}
    if config.keep_fraction is not None:
        kept = lowest(scores, config.keep_fraction)
        if not kept:
            raise DataError(
                f"--keep-fraction {config.keep_fraction} keeps none of {len(scores)} documents, "
                f"{found['all']['scored']} of which have a score; keep more, or give more documents"
            )
        found["kept"] = summarize([scores[i] for i in kept])
    pairs = [(p, s) for p, s in zip(prompts, scores, strict=True) if p is not None]
    continued = by_prompt([p for p, _ in pairs], [s for _, s in pairs])
    if config.prompt_path is not None and not toxicity.keys() & continued.keys():
        raise DataError(
            f"--prompt-path {config.prompt_path}: has the toxicity of no prompt that a document "
            f"continues (--prompt-key {config.prompt_key}); give the file of their prompts"
        )
    if continued:
        found["prompts"] = of_prompts(continued, toxicity)
        least, most = found["prompts"]["continuations"]
        if least != most:
            log.warning(
                "prompts have between %d and %d continuations each, and a prompt with more has a "
                "higher maximum",
                *(least, most),
            )
    return found


def _decide(config: ScoreConfig, folder: Path, units: Sequence[UnitScores]) -> None:
    """Write for each unit its scores, and which documents stay, for the workers."""
    folder.mkdir()
    scores = list(chain.from_iterable(unit.scores for unit in units))
    places = range(len(scores))
    fraction = config.keep_fraction
    kept = set(places if fraction is None else lowest(scores, fraction))
    first = 0
    for number, unit in enumerate(units):
        stays = [first + i in kept for i in range(len(unit.scores))]
        (folder / f"{number:05d}.json").write_text(json.dumps([unit.scores, stays]))
        first += len(unit.scores)


def write_unit(job: UnitJob) -> UnitDone:
    """Write the documents of a unit with their scores, in a worker."""
    config: ScoreConfig = job.config
    scores, stays = json_text.loads(
        Path(job.scratch, DECISIONS, f"{job.number:05d}.json").read_text()
    )
    tally = Tally.of([RULE] if config.keep_fraction is not None else [])
    reader = reader_of(job)
    with UnitFiles(job) as files:
        number = -1
        for number, item in enumerate(reader.items()):
            if number < len(scores):
                files.write(*_written(config, tally, item, scores[number], stays[number]))
        if number + 1 != len(scores):
            raise DataError(
                f"{job.unit.sources[0].url}: had {len(scores)} documents when they were scored, "
                f"and {number + 1} now: a file was changed; run again"
            )
        files.write_all(DROPPED, (dropped_line(*bad) for bad in reader.bad))
    tally.bad_lines = len(reader.bad)
    return UnitDone(files.records, tally.document())


def _written(
    config: ScoreConfig, tally: Tally, item: Item, score: Score, stays: bool
) -> tuple[str, dict[str, Any]]:
    """Where a document goes, and what is written of it."""
    text = str(item.fields[config.documents.json_key])
    tally.documents += 1
    tally.chars += len(text)
    others = attributes_of(item) or {}
    own = None if score is None and not others else {**others, config.attribute: score}
    fields = {**item.fields, SCORE: own}
    if stays:
        tally.kept += 1
        tally.kept_chars += len(text)
        return DOCUMENTS, fields
    none = "no score" if text.strip() else "empty text"
    why = none if score is None else f"{config.attribute} {score:.4g}"
    reason = tally.reasons[RULE]
    reason.dropped += 1
    reason.dropped_chars += len(text)
    reason.sample(config.documents.num_samples, item.place, why, text)
    return DROPPED, dropped(fields, RULE, why)
