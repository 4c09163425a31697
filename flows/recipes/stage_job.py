"""A stage with its options, as a flow passes it to the stage task. No Prefect here."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flows.stage_configs import CONFIGS
from trainyard.artifacts.digest import SHORT, digest_document
from trainyard.artifacts.documents import read_text, suffix
from trainyard.artifacts.error_text import nearest
from trainyard.artifacts.output import MANIFEST, Output
from trainyard.artifacts.urls import show_url
from trainyard.config import from_dict, suggest
from trainyard.config_text import parse_document
from trainyard.errors import ArtifactError, ConfigError, TrainyardError

STEP_MANIFEST = re.compile(rf"iter_(\d{{7,}})/{re.escape(MANIFEST)}")
"""The file of a run folder that publishes a step (docs/formats.md)."""

SHARES = "-shares"
"""Suffix of the name of the job that makes the shares of an output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageJob:
    """A stage with its options and a name, for one use in a flow."""

    stage: str
    """Package under stages/."""
    document: Mapping[str, Any]
    """The options as written; the stage fills in its defaults where it runs."""
    output: Output | None
    label: str = ""
    num_shares: int = 0
    """Number of shares that make the output, by --rank and --world-size; 0: one job makes it."""
    num_runs: int = 1
    """Runs of the stage that the document lists; of several, each publishes an output."""

    @property
    def name(self) -> str:
        """The stage, or the label if the stage runs more than once in a flow."""
        return self.label or self.stage


def config_class(stage: str) -> type[Any]:
    """The class of a stage's options; ConfigError for a stage that does not exist."""
    if stage not in CONFIGS:
        raise ConfigError(f"there is no stage {stage!r}; {suggest(stage, CONFIGS, 'stages:')}")
    return CONFIGS[stage]


def build_config(
    stage: str, document: Mapping[str, Any], where: str, num_ranks: int | None = None
) -> Any:
    """The validated options; a ConfigError names where they were written.

    num_ranks: of a training; None: unknown."""
    given = {key: value for key, value in document.items() if value is not None}
    with located_errors(where):
        config = from_dict(config_class(stage), given, where)
        if hasattr(config, "check_ranks"):
            config.check_ranks(num_ranks)
    return config


@contextmanager
def located_errors(where: str) -> Iterator[None]:
    """Begin the message of every error of options or inputs with where they were written."""
    try:
        yield
    except (ConfigError, ArtifactError) as error:
        kind = ConfigError if isinstance(error, ConfigError) else ArtifactError
        text = str(error)
        raise kind(text if text.startswith(where) else f"{where}: {text}") from error


def read_job(stage: str, config: str) -> StageJob:
    """The job that a config document describes."""
    try:
        text = read_text(config)
    except TrainyardError as error:
        raise unreadable("--config", config, error) from error
    return stage_job(stage, parse_document(text, suffix(config), config), config)


def unreadable(what: str, path: str, error: Exception) -> ConfigError:
    """The error for a file that cannot be read, with the nearest name and, for a relative path, the
    folder where the path starts, which may be that of a worker."""
    shown = show_url(path)
    message = nearest(path, str(error).removeprefix(f"{shown}: "))
    is_whole = "://" in path or path.startswith("/")
    where = "" if is_whole else f"; the path starts at {Path.cwd()}"
    return ConfigError(f"{what} {shown} cannot be read: {message}{where}")


def stage_job(
    stage: str,
    document: Mapping[str, Any],
    where: str,
    label: str = "",
    num_ranks: int | None = None,
) -> StageJob:
    """A job with validated options. num_ranks: of a training; None: unknown."""
    config = build_config(stage, document, where, num_ranks)
    return StageJob(stage=stage, document=dict(document), output=config.output(), label=label)


def num_shares(job: StageJob, count: int) -> int:
    """Number of jobs that make this output together: `count`, or 1 if there is none, or its options
    allow no shares, such as those of a merge that copies nothing."""
    if count < 2 or job.output is None:
        return 1
    return count if build_config(job.stage, job.document, job.name).can_be_shared() else 1


def in_shares(job: StageJob, count: int) -> StageJob:
    """The job that makes the shares of an output; it publishes nothing itself."""
    document = {**job.document, "world_size": count}
    label = f"{job.name}{SHARES}"
    return StageJob(stage=job.stage, document=document, output=None, label=label, num_shares=count)


def in_batches(jobs: Sequence[StageJob], most: int) -> list[StageJob]:
    """These jobs of one stage, neighbours put together as runs of one job, if there are more than
    `most`: each job costs a process, and a flow about a second."""
    size = -(-len(jobs) // most)
    if size < 2:
        return list(jobs)
    return [_batch(jobs[i : i + size]) for i in range(0, len(jobs), size)]


def _batch(jobs: Sequence[StageJob]) -> StageJob:
    """The job that makes the outputs of these, one after another (stages/runtime/batch.py)."""
    first = jobs[0].document
    common = {k: v for k, v in first.items() if all(job.document.get(k) == v for job in jobs)}
    runs = [{k: v for k, v in job.document.items() if k not in common} for job in jobs]
    document = {**common, "runs": runs}
    # By its contents: a flow that starts again follows the job of the same files.
    label = f"{jobs[0].stage}-batch-{digest_document(document)[:SHORT]}"
    return StageJob(
        stage=jobs[0].stage, document=document, output=None, label=label, num_runs=len(jobs)
    )


def joined(job: StageJob, count: int) -> StageJob:
    """The job that joins the shares of an output."""
    return replace(job, document={**job.document, "world_size": count})
