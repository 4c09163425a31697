"""From units of documents to files of the output: by workers, resumed after a kill, in shares.

Unit n of the input becomes documents-n.jsonl and dropped-n.jsonl, the same for any number of
workers and shares. A worker writes both in their places; what it returns makes the unit
finished. Shares of a large input cut units into pieces: piece p becomes documents-n-p.jsonl, and a
join lays the pieces of a unit end to end."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from typing import Any, Protocol, TypeVar

from stages.runtime.context import StageRun
from stages.runtime.share_digests import files_to_digest
from trainyard.artifacts import store
from trainyard.artifacts.digest import digest_bytes
from trainyard.artifacts.inputs import check_all_listed
from trainyard.artifacts.manifest import read_listed
from trainyard.artifacts.store import FileInfo, FileRecord
from trainyard.collection.documents import UnitReader, short_names
from trainyard.collection.options import DocumentsConfig
from trainyard.corpus.documents import check_inputs, split_ranges
from trainyard.corpus.units import (
    InputFile,
    Split,
    Unit,
    look_at,
    plan_pieces,
    plan_units,
    share_of,
)
from trainyard.corpus.workers import Crew, run_jobs
from trainyard.machine import available_cores

log = logging.getLogger(__name__)

DOCUMENTS, DROPPED = "documents", "dropped"
KINDS = (DOCUMENTS, DROPPED)
BAD = "bad"
"""Of a piece: its bad lines, which in the file of the unit follow all that was dropped."""


class Job(Protocol):
    """A piece of the work of one pass, done by a worker."""

    @property
    def label(self) -> str:
        """Names it among all of the pass."""

    @property
    def size_bytes(self) -> int:
        """What it reads, for progress."""

    @property
    def folder(self) -> str:
        """Where its files go."""

    def final_names(self) -> Sequence[str]:
        """The files of the output that it may write."""


J = TypeVar("J", bound=Job)


class ShareOptions(Protocol):
    """What these functions read of the options of a stage that is made in shares."""

    @property
    def rank(self) -> int | None:
        """The share to make; None for the whole."""

    @property
    def world_size(self) -> int | None:
        """The number of shares."""


class UnitOptions(ShareOptions, Protocol):
    """What they read of a stage from documents to documents."""

    @property
    def documents(self) -> DocumentsConfig:
        """Its input."""


@dataclass(frozen=True, slots=True)
class UnitJob:
    """The input of a worker."""

    number: int
    """Number of the unit in the whole input."""
    unit: Unit
    names: Mapping[str, str]
    """Short names of its files."""
    folder: str
    """Where its files go."""
    config: Any
    """Options of the stage."""
    scratch: str
    """A folder on this machine that the run removes at its end."""
    digested: Mapping[str, FileInfo] = field(default_factory=dict)
    """Files of which a share digests blocks as it reads them."""
    piece: int | None = None
    """Number of the piece, if the unit has several."""

    @property
    def label(self) -> str:
        """Its number, and that of the piece."""
        unit = f"{self.number:05d}"
        return unit if self.piece is None else f"{unit}-{self.piece:05d}"

    @property
    def size_bytes(self) -> int:
        """Size of its input."""
        return self.unit.size_bytes

    def name(self, kind: str) -> str:
        """The name of one of its files."""
        return f"{kind}-{self.label}.jsonl"

    def final_names(self) -> tuple[str, ...]:
        """The files of the output that are made of it."""
        return tuple(map(self.name, KINDS if self.piece is None else (*KINDS, BAD)))


U = TypeVar("U", bound=UnitJob)


@dataclass(frozen=True, slots=True)
class UnitFile:
    """A file of a unit that one pass wrote and another reads."""

    url: str
    record: FileRecord
    """As it was written: in the manifest of a share, or by a worker of this run."""

    def read(self) -> bytes:
        """Its contents; ArtifactError if they have another digest."""
        return read_listed(self.url, self.record)


@dataclass(frozen=True, slots=True)
class UnitDone:
    """What a worker returns: the files that it wrote, and facts of its stage, JSON-able."""

    files: tuple[FileRecord, ...]
    facts: dict[str, Any]
    digests: Sequence[Sequence[str]] = ()
    """Of each source of the unit, those of its blocks, in a share."""


def reader_of(job: UnitJob) -> UnitReader:
    """What reads the unit of a job."""
    documents: DocumentsConfig = job.config.documents
    return UnitReader(
        job.unit,
        job.names,
        documents.json_key,
        documents.on_bad_line,
        documents.max_document_bytes,
        digested=job.digested,
    )


def plan_jobs(stage: StageRun, config: UnitOptions) -> list[UnitJob]:
    """The jobs of all units, or of this rank's share. Raises the errors of the input."""
    documents = config.documents
    files = check_inputs(documents.input, stage.inputs["input"].files, (documents.json_key,))
    sizes = look_at(files)
    return jobs_of_share(jobs_of(stage, config, files, plan_units(sizes)), config, sizes)


def jobs_of_share(
    jobs: Sequence[U],
    config: ShareOptions,
    files: Sequence[InputFile],
    split: Split = split_ranges,
) -> list[U]:
    """The pieces of these jobs that a share does, digesting the blocks that it reads; for the
    whole, the jobs. files: the whole input."""
    if config.rank is not None and config.world_size is not None:
        pieces = plan_pieces([job.unit for job in jobs], config.world_size, split)
        mine = share_of(list(chain.from_iterable(pieces)), config.rank, config.world_size)
        chosen = set(map(id, mine))  # units of several sources may have the same name
        own = [
            _piece(job, units, number)
            for job, units in zip(jobs, pieces, strict=True)
            for number, unit in enumerate(units)
            if id(unit) in chosen
        ]
        jobs = _digesting(own, files)
    # By one share each.
    check_all_listed({s.url for job in jobs for s in job.unit.sources if s.start == 0})
    return list(jobs)


def pieces_of(jobs: Sequence[U], world_size: int, split: Split = split_ranges) -> list[list[U]]:
    """The pieces of each job that shares do."""
    pieces = plan_pieces([job.unit for job in jobs], world_size, split)
    return [
        [_piece(job, units, number) for number in range(len(units))]
        for job, units in zip(jobs, pieces, strict=True)
    ]


def _piece(job: U, units: Sequence[Unit], number: int) -> U:
    """One of the pieces into which the unit of a job falls."""
    if len(units) == 1:
        return job
    unit = units[number]
    return replace(job, unit=unit, piece=number, names=_of(unit, job.names))


def _of(unit: Unit, names: Mapping[str, str]) -> dict[str, str]:
    return {source.url: names[source.url] for source in unit.sources}


def _digesting(jobs: Sequence[U], files: Sequence[InputFile]) -> list[U]:
    mine = {source.url for job in jobs for source in job.unit.sources}
    found = files_to_digest(
        (file.url, FileInfo(file.size_bytes, file.version)) for file in files if file.url in mine
    )
    return [
        replace(job, digested={url: found[url] for url in job.names if url in found})
        for job in jobs
    ]


def jobs_of(
    stage: StageRun, config: Any, files: Sequence[str], units: Sequence[Unit]
) -> list[UnitJob]:
    """The jobs of these units. files: the whole input."""
    names = short_names(files)
    assert stage.output is not None
    place = (stage.output.url, config, str(stage.scratch))
    return [UnitJob(number, unit, _of(unit, names), *place) for number, unit in enumerate(units)]


def run_units(
    stage: StageRun,
    jobs: Sequence[J],
    work: Callable[[J], UnitDone],
    num_workers: int | None,
    what: str,
    final_names: Callable[[J], Sequence[str]] | None = None,
    side_by_side: bool = False,
) -> list[dict[str, Any]]:
    """The facts of every job, in order; those that a killed run finished are not done again.

    what: names this pass in the work folder and in progress. final_names: files of the output that
    a job may write, if not its own; none for a pass that writes to the work folder. side_by_side:
    as `Crew.of`."""
    done = run_each(stage, jobs, work, num_workers, what, final_names, side_by_side)
    return [one.facts for one in done]


def run_each(
    stage: StageRun,
    jobs: Sequence[J],
    work: Callable[[J], UnitDone],
    num_workers: int | None,
    what: str,
    final_names: Callable[[J], Sequence[str]] | None,
    side_by_side: bool,
) -> list[UnitDone]:
    """What every job has done, in order."""
    finished = [(job, _finished(stage, job, what)) for job in jobs]
    names_of = final_names or (lambda job: job.final_names())
    final = {name for job in jobs for name in names_of(job)}
    if final:
        stage.begin_files(final)
    found = _run(stage, finished, work, num_workers, what, side_by_side)
    for done in found:
        for record in done.files:
            if record.path in final:
                stage.record(record)
    return found


def run_first_pass(
    stage: StageRun,
    jobs: Sequence[U],
    work: Callable[[U], UnitDone],
    num_workers: int | None,
    what: str,
    folder: str,
    side_by_side: bool = False,
) -> list[UnitFile]:
    """As `run_units`, for a pass of which each job writes one file for another pass to read; these
    files, in order. One that was changed after a killed run is made again.

    folder: the name of theirs in the work folder."""
    url = stage.work.url(folder)
    own = [replace(job, folder=url) for job in jobs]
    finished = [(job, _finished(stage, job, what, by_digest=True)) for job in own]
    found = _run(stage, finished, work, num_workers, what, side_by_side)
    return [
        UnitFile(store.join(url, record.path), record) for done in found for record in done.files
    ]


def _run(
    stage: StageRun,
    jobs: Sequence[tuple[J, UnitDone | None]],
    work: Callable[[J], UnitDone],
    num_workers: int | None,
    what: str,
    side_by_side: bool,
) -> list[UnitDone]:
    """What all jobs have done, in order. jobs: with what a killed run finished."""
    finished = {job.label: done for job, done in jobs if done is not None}
    todo = [job for job, done in jobs if done is None]
    if finished:
        log.info("resuming: units_done=%d units=%d", len(finished), len(jobs))
    cores = available_cores()
    crew = Crew.of(min(num_workers or cores, cores), side_by_side)
    total, left = sum(job.size_bytes for job, _ in jobs), sum(job.size_bytes for job in todo)
    with stage.progress(total, "bytes", what, start=total - left) as progress:
        for job, done in run_jobs(work, todo, crew, {"TOKENIZERS_PARALLELISM": "false"}):
            stage.work.publish(_key(job, what), asdict(done))
            finished[job.label] = done
            progress.update(job.size_bytes)
    return [finished[job.label] for job, _ in jobs]


def _key(job: Job, what: str) -> str:
    return f"{what}-{job.label}"


def _finished(stage: StageRun, job: Job, what: str, by_digest: bool = False) -> UnitDone | None:
    """What a killed run finished, if its files are still there. by_digest: and have the contents
    that they had, not only the size."""
    found = stage.work.published(_key(job, what))
    if found is None:
        return None
    records = tuple(FileRecord(**one) for one in found["files"])
    done = UnitDone(records, found["facts"], found["digests"])
    for record in done.files:
        url = store.join(job.folder, record.path)
        size_bytes = store.info(url).size_bytes if store.exists(url) else 0
        if size_bytes != record.size_bytes:
            log.warning(
                "%s has %d bytes, and %d when a killed run finished it; making it again",
                *(url, size_bytes, record.size_bytes),
            )
            return None
        if by_digest and digest_bytes(store.read_bytes(url)) != record.digest:
            log.warning("%s changed after a killed run finished it; making it again", url)
            return None
    return done
