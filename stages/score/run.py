"""Score all units, decide which documents stay, and write them with their scores."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
from trainyard.classifiers.ngrams import EPOCHS
from trainyard.classifiers.toxicity import Prompts, Scores, lowest, of_prompts, summarize
from trainyard.collection.documents import Item, dropped
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
        run_share(*(stage, jobs, score_unit, config.workers, "score"), lambda job: (name_of(job),))
        stage.write_json(report_of(config.rank), trained)
        return {"units": len(jobs)}
    if config.world_size is not None:
        trained, files = _join(config, stage, jobs)
    else:
        trained = prepare(config, stage)
        scored = run_first_pass(stage, jobs, score_unit, config.workers, "score", "scores")
        files = [[file] for file in scored]
    scores, prompts, ends = _read(files)
    kept = choose(config, scores)
    measured = measure(config, scores, prompts, kept, toxicity)
    _write_decisions(stage.scratch / DECISIONS, scores, kept, ends)
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
    """Train or try the classifier before any work; its accuracy on held-out examples, and the
    digest of its weights."""
    if config.classifier == ANNOTATED:
        return {}
    if config.classifier != NGRAMS:
        scorer_of(config.classifier, "")
        return {}
    assert config.classifier_data is not None, "the options see to it"
    examples = read_examples(config.classifier_data)
    with stage.progress(EPOCHS, "epochs", "train") as progress:
        classifier, measured = train_classifier(examples, progress.update)
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
) -> tuple[dict[str, Any], list[list[UnitFile]]]:
    """The classifier of all shares, and the scores of each unit. ArtifactError if each trained its
    own: the same examples give other weights on another kind of machine."""
    shares = config.all_shares()
    reports = [report_of(rank) for rank in range(len(shares))]
    files = FilesOfShares(stage, shares, "score")
    trained = [json_text.loads(files.named(name).read()) for name in reports]
    for share, one in zip(shares, trained, strict=True):
        if one != trained[0]:
            raise ArtifactError(
                f"{share.url}: trained other weights than {shares[0].url}, so their scores do not "
                f"compare; remove {config.shares_url} and make all on one kind of machine"
            )
    return trained[0], files.of_pieces(jobs, name_of)


def _read(files: Sequence[Sequence[UnitFile]]) -> tuple[Scores, Prompts, list[int]]:
    """The scores and prompts of all documents, and where each unit ends among them. files: of the
    pieces of each unit."""
    units = [[UnitScores.parse(file.read(), file.url) for file in own] for own in files]
    pieces = list(chain.from_iterable(units))
    scores = np.concatenate([piece.scores for piece in pieces])
    prompts = np.concatenate([piece.prompts for piece in pieces])
    ends = accumulate(sum(len(piece.scores) for piece in own) for own in units)
    return scores, prompts, list(ends)


def choose(config: ScoreConfig, scores: Scores) -> NDArray[np.bool_]:
    """(documents,) which of them stay. DataError if none does."""
    if config.keep_fraction is None:
        return np.ones(len(scores), np.bool_)
    kept = lowest(scores, config.keep_fraction)
    if not kept.any():
        raise DataError(
            f"--keep-fraction {config.keep_fraction} keeps none of {len(scores)} documents, "
            f"{int((~np.isnan(scores)).sum())} of which have a score; keep more, or give more "
            "documents"
        )
    return kept


def measure(
    config: ScoreConfig,
    scores: Scores,
    prompts: Prompts,
    kept: NDArray[np.bool_],
    toxicity: Mapping[bytes, float],
) -> dict[str, Any]:
    """What the report says about the scores of all documents. DataError for prompts that are not
    those that the texts continue."""
    found: dict[str, Any] = {"attribute": config.attribute, "all": summarize(scores)}
    if config.keep_fraction is not None:
        found["kept"] = summarize(scores[kept])
    continued = of_prompts(prompts, scores, toxicity)
    if config.prompt_path is not None and not _knows_any(continued):
        raise DataError(
            f"--prompt-path {config.prompt_path}: has the toxicity of no prompt that a document "
            f"continues (--prompt-key {config.prompt_key}); give the file of their prompts"
        )
    if continued is not None:
        found["prompts"] = continued
        least, most = continued["continuations"]
        if least != most:
            log.warning(
                "prompts have between %d and %d continuations each, and a prompt with more has a "
                "higher maximum",
                *(least, most),
            )
    return found


def _knows_any(continued: dict[str, Any] | None) -> bool:
    """Whether the own toxicity of some prompt is known."""
    return continued is not None and any(
        continued[kind]["prompts"] for kind in ("toxic", "nontoxic")
    )


def _write_decisions(
    folder: Path, scores: Scores, kept: NDArray[np.bool_], ends: Sequence[int]
) -> None:
    """Write for each unit its scores, and which documents stay, for the workers."""
    folder.mkdir()
    for number, (first, end) in enumerate(pairwise([0, *ends])):
        path = folder / f"{number:05d}.npz"
        np.savez(path, scores=scores[first:end], kept=kept[first:end])


def write_unit(job: UnitJob) -> UnitDone:
    """Write the documents of a unit with their scores, in a worker."""
    config: ScoreConfig = job.config
    with np.load(Path(job.scratch, DECISIONS, f"{job.number:05d}.npz")) as arrays:
        scores: list[float] = arrays["scores"].tolist()
        kept: list[bool] = arrays["kept"].tolist()
    tally = Tally.of([RULE] if config.keep_fraction is not None else [])
    reader = reader_of(job)
    with UnitFiles(job) as files:
        number = -1
        for number, item in enumerate(reader.items()):
            if number < len(scores):
                files.write(*_written(config, tally, item, scores[number], kept[number]))
        if number + 1 != len(scores):
            raise DataError(
                f"{job.unit.sources[0].url}: had {len(scores)} documents when they were scored, "
                f"and {number + 1} now: a file was changed; run again"
            )
        files.write_bad(reader.bad)
    tally.bad_lines = len(reader.bad)
    return UnitDone(files.records, tally.document())


def _written(
    config: ScoreConfig, tally: Tally, item: Item, number: float, stays: bool
) -> tuple[str, dict[str, Any]]:
    """Where a document goes, and what is written of it. number: its score."""
    score = None if math.isnan(number) else number
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
