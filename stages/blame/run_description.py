"""Describes the run in question by its checkpoint, or by the options that started it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from stages.blame.config import BlameConfig
from trainyard.artifacts import store
from trainyard.artifacts.manifest import Manifest, read_manifest
from trainyard.artifacts.output import MANIFEST
from trainyard.artifacts.urls import join, parent
from trainyard.checkpoint.steps import (
    CONFIG,
    STATE,
    find_steps,
    locate_step,
    step_document,
    step_folder,
    step_of,
)
from trainyard.config import differing, digest_relevant, from_dict, to_dict
from trainyard.datasets.config import DataConfig
from trainyard.errors import ArtifactError, ConfigError
from trainyard.models.families import FAMILIES
from trainyard.training.loop.batch_size import BatchSizeSchedule
from trainyard.training.loop.ledger import FILE as LEDGER
from trainyard.training.loop.ledger import parse_ledger
from trainyard.training.loop.length import RunLength, length_of
from trainyard.training.options.training import TrainingConfig
from trainyard.training.run.dp_history import DpSpan, spans_of_step
from trainyard.training.run.run_record import check_token_files, named_token_files
from trainyard.training.run.segments import segments_of_step

FORMAT_VERSION = 1
"""Of the documents of a checkpoint."""

NEEDED = ("seq_length", "micro_batch_size")
LENGTHS = ("train_iters", "train_samples")
SIZES = (
    "global_batch_size",
    "rampup_batch_size",
    "step_batch_size_schedule",
    "decrease_batch_size_if_needed",
)
"""Options that decide how many samples a step has."""


@dataclass(frozen=True, slots=True)
class RunDescription:
    """Everything that decides which samples a run served in which step."""

    data: DataConfig
    seq_length: int
    training: TrainingConfig
    data_parallel_size: int | None
    """Of the steps that are in none of `spans`; None when unknown."""
    spans: tuple[DpSpan, ...]
    """The layouts of steps that the run recorded."""
    ledger: Mapping[int, str]
    """Digest of the samples of each finished step."""

    @property
    def length(self) -> RunLength:
        """The length of the run, by its first layout."""
        ranks = self.spans[0].data_parallel_size if self.spans else self.data_parallel_size or 1
        return length_of(self.training, ranks, self.seq_length)

    @property
    def steps(self) -> int:
        """Steps of the whole run."""
        return self.length.steps

    def batch_size_schedule(self, ranks: int, micro_batch_size: int) -> BatchSizeSchedule:
        """The batch sizes of steps on `ranks` data-parallel ranks."""
        training = replace(self.training, micro_batch_size=micro_batch_size)
        return length_of(training, ranks, self.seq_length).batch_size_schedule


def describe(config: BlameConfig) -> RunDescription:
    """The run of --load, otherwise the run of the options."""
    if config.load is not None:
        return _of_checkpoint(config, config.load)
    if config.train_samples is None:
        _number(config, "train_iters")
    if config.step_batch_size_schedule is None:
        _number(config, "global_batch_size")
    for name in NEEDED:
        _number(config, name)
    if not config.data.names_data():
        raise ConfigError("--data-path or --load is required: the data of the run")
    given = {name: getattr(config, name) for name in (*NEEDED, *LENGTHS, *SIZES, "seed")}
    return RunDescription(
        data=config.data,
        seq_length=given.pop("seq_length"),
        training=_training(given),
        data_parallel_size=_ranks(config) or 1,
        spans=(),
        ledger={},
    )


def _number(config: BlameConfig, name: str) -> None:
    value: int | None = getattr(config, name)
    if value is None or value < 1:
        flag = "--" + name.replace("_", "-")
        if value is None:
            raise ConfigError(f"{flag} is missing: without --load, give the options of the run")
        raise ConfigError(f"{flag} must be at least 1, got {value}")


def _ranks(config: BlameConfig) -> int | None:
    ranks = config.data_parallel_size
    if ranks is not None and ranks < 1:
        raise ConfigError(f"--data-parallel-size must be at least 1, got {ranks}")
    return ranks


def _training(options: Mapping[str, Any]) -> TrainingConfig:
    given = {name: value for name, value in options.items() if value is not None}
    return from_dict(TrainingConfig, given, "the options of the run")


# --- from a checkpoint ------------------------------------------------------------------------


def _of_checkpoint(config: BlameConfig, load: str) -> RunDescription:
    url, _ = locate_step(load, "--load")
    root = parent(url) if step_of(store.basename(url)) is not None else url
    run_manifest = _run_manifest(root)
    made_of, state = _document(url, CONFIG), _document(url, STATE)
    run = {**made_of["run"], "global_batch_size": state["global_batch_size"]}
    if config.step is not None:
        run |= _course(root, url, config.step)
    if not FAMILIES[run.get("model_type", "gpt")].of_documents:
        raise ConfigError(
            f"--load {load}: is a run of --model-type {run['model_type']}, whose samples are "
            "sentences; blame knows the documents of a GPT's samples alone"
        )
    if run.get("sft"):
        raise ConfigError(
            f"--load {load}: is a run of --sft, whose samples are lines of instruction data and "
            "not documents of token files; blame knows those alone"
        )
    agreed = {name: _agreed(config, name, run) for name in (*NEEDED, *LENGTHS, *SIZES, "seed")}
    data = _data(config, run, run_manifest)
    if config.check_data:
        check_token_files(data, made_of["inputs"], "--load", "--no-check-data")
    return RunDescription(
        data=data,
        seq_length=agreed.pop("seq_length"),
        training=_training(agreed),
        data_parallel_size=_ranks(config),
        spans=_spans(root, url),
        ledger=_ledger(root, url),
    )


def _course(root: str, step_url: str, step: int) -> dict[str, Any]:
    """The options of a step, if the run went on under others after it."""
    last = step_of(store.basename(step_url))
    segments = () if last is None else segments_of_step(root, last)
    found = next((one for one in segments if one.first_step <= step <= one.last_step), None)
    options = dict(found.course) if found else {}
    if options.get("global_batch_size") is None:
        options.pop("global_batch_size", None)
    return options


def _document(url: str, name: str) -> dict[str, Any]:
    document: dict[str, Any] = step_document(url, name)
    if document.get("format_version") != FORMAT_VERSION:
        raise ArtifactError(
            f"{join(url, name)}: format_version {document.get('format_version')}; this version of "
            f"trainyard reads {FORMAT_VERSION}"
        )
    return document


def _run_manifest(root: str) -> Manifest | None:
    found = read_manifest(join(root, MANIFEST))
    return found[0] if found is not None and found[0].stage == "pretrain" else None


def _agreed(config: BlameConfig, name: str, run: Mapping[str, Any]) -> Any:
    given, value = getattr(config, name), run.get(name)
    if given not in (None, False, ()) and to_dict(config)[name] != value:
        raise ConfigError(
            f"--{name.replace('_', '-')} {given}: the run of --load has {value}; leave it out"
        )
    return value


def _data(config: BlameConfig, run: Mapping[str, Any], manifest: Manifest | None) -> DataConfig:
    """The run's options, with paths from the command line or the manifest of the run."""
    options = digest_relevant(config.data)
    for name, value in differing(config.data).items():
        if name in options and value != run.get(name, value):
            raise ConfigError(
                f"--{name.replace('_', '-')} {value!r}: the run of --load has {run[name]!r}; leave "
                "it out"
            )
    document = {**to_dict(config.data), **{k: run[k] for k in options if k in run}}
    if not config.data.names_data():
        if manifest is None:
            raise ConfigError(
                "--data-path is required: a run that is not finished has no manifest with the "
                "paths of its token files"
            )
        document.update(named_token_files(manifest))
    return from_dict(DataConfig, document, "--load")


def _spans(root: str, step_url: str) -> tuple[DpSpan, ...]:
    """The layouts of all steps of the run, by its last checkpoint."""
    step = step_of(store.basename(step_url))
    found = read_manifest(join(step_url, MANIFEST))
    if step is None or found is None:
        return ()
    return spans_of_step(root, max([step, *find_steps(root, found[0].lineage)]))


def _ledger(root: str, step_url: str) -> dict[int, str]:
    """Digests of the samples of the steps in the ledgers of the run."""
    urls = [join(root, LEDGER)]
    if not store.exists(urls[0]):
        urls = [join(root, step_folder(step), LEDGER) for step in find_steps(root)]
    lines = [line for url in urls or [join(step_url, LEDGER)] for line in _lines(url)]
    return {line["step"]: line["samples"] for line in lines if "samples" in line}


def _lines(url: str) -> list[dict[str, Any]]:
    try:
        return parse_ledger(store.read_bytes(url))
    except ValueError as error:
        raise ArtifactError(f"{url}: not a ledger: {error}") from error
