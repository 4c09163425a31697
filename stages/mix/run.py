"""Count the sources, plan the mixture, and shuffle it: each pass restartable, memory bounded.

An external shuffle in the manner of a distribution sort: every document gets a key from a hash of
its text, a shard is a range of keys, and each is sorted alone."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from stages.mix.config import MixConfig
from stages.mix.scatter import (
    MixJob,
    MixPlan,
    Sizes,
    measure_unit,
    parse_block,
    scatter_unit,
    sizes_name,
)
from stages.runtime.context import StageRun
from stages.runtime.document_units import (
    DOCUMENTS,
    UnitDone,
    UnitFile,
    jobs_of_share,
    run_first_pass,
    run_units,
)
from stages.runtime.unit_shares import (
    FilesOfShares,
    run_share,
)
from trainyard.artifacts import store
from trainyard.collection import mixture
from trainyard.collection.counting import token_counter
from trainyard.collection.documents import short_names
from trainyard.collection.proportions import plan_epochs
from trainyard.corpus.documents import check_inputs
from trainyard.corpus.units import InputFile, look_at, plan_units
from trainyard.errors import ConfigError

log = logging.getLogger(__name__)

REPORT = "report.json"
PIECES, BOUNDS = "pieces.txt", "bounds.npy"


@dataclass(slots=True)
class Source:
    """What is counted of a source, before and after."""

    documents: int = 0
    size: int = 0
    text_bytes: int = 0
    bad_lines: int = 0
    epochs: float = 0.0
    mixed_documents: int = 0
    mixed_size: int = 0


def run(config: MixConfig, stage: StageRun) -> dict[str, Any]:
    """Write the shards of the mixture; with --rank, the sizes of a share."""
    began = time.monotonic()
    token_counter(config.tokenizer())  # raises its errors before any work
    jobs = plan_jobs(config, stage)
    if config.rank is not None:
        run_share(
            stage, jobs, measure_unit, config.workers, "measure", lambda job: (sizes_name(job),)
        )
        return {"units": len(jobs)}
    if config.world_size is None:
        measured = run_first_pass(stage, jobs, measure_unit, config.workers, "measure", "sizes")
        files = [[file] for file in measured]
    else:
        files = FilesOfShares(stage, config.all_shares(), "mix").of_pieces(jobs, sizes_name)
    sources, plan = _plan(config, jobs, files)
    shards = _scatter(config, stage, jobs, files, plan, sources)
    run_units(stage, shards, write_shard, config.workers, "shuffle")
    document = _report(config, sources, plan.num_shards)
    stage.write_json(REPORT, document)
    log.info(
        "mixed sources=%d documents=%d shards=%d seconds=%.2f",
        *(len(sources), document["documents"], plan.num_shards, time.monotonic() - began),
    )
    return document


def plan_jobs(config: MixConfig, stage: StageRun) -> list[MixJob]:
    """The units of all sources, or of this rank's share. Raises the errors of the input."""
    assert stage.output is not None
    jobs: list[MixJob] = []
    sizes: list[InputFile] = []
    read: dict[str, str] = {}
    for name in config.places():
        given = stage.inputs[f"source.{name}"]
        files = check_inputs(given.urls, given.files, (config.json_key,))
        _refuse_again(read, name, files)
        names = short_names(files)
        found = look_at(files)
        sizes += found
        for unit in plan_units(found):
            its = {source.url: names[source.url] for source in unit.sources}
            place = (stage.output.url, config, str(stage.scratch))
            jobs.append(MixJob(len(jobs), unit, its, *place, source=name))
    return jobs_of_share(jobs, config, sizes)


def _refuse_again(read: dict[str, str], name: str, files: Sequence[str]) -> None:
    """Refuse a file that is in the mixture already; add the others to `read`, with their source."""
    for file in files:
        if file in read:
            both = name if read[file] == name else f"{read[file]} and {name}"
            raise ConfigError(
                f"--input names {file} twice, for source {both}; give it once, and repeat a source "
                "by --epochs or --weights"
            )
        read[file] = name


def _plan(
    config: MixConfig, jobs: Sequence[MixJob], files: Sequence[Sequence[UnitFile]]
) -> tuple[dict[str, Source], MixPlan]:
    """Add the sizes up; those of one unit are in memory at a time."""
    sources = {name: Source() for name in config.places()}
    bins = {name: np.zeros(mixture.BINS, np.int64) for name in sources}
    for job, own in zip(jobs, files, strict=True):
        found, total = Sizes.of_pieces(own), sources[job.source]
        total.documents += len(found.sizes)
        total.size += int(found.sizes.sum())
        total.text_bytes += found.text_bytes
        total.bad_lines += found.bad_lines
        bins[job.source] += found.bins
    names, sizes = list(sources), [one.size for one in sources.values()]
    epochs = plan_epochs(names, sizes, config.proportions())
    for source, many in zip(sources.values(), epochs, strict=True):
        source.epochs = many
    text_bytes = sum(one.text_bytes * one.epochs for one in sources.values())
    num_shards = max(-(-int(text_bytes) // max(int(config.shard_size_mb * 1e6), 1)), 1)
    limits = {name: mixture.threshold(bins[name], one.epochs % 1) for name, one in sources.items()}
    return sources, MixPlan(num_shards, dict(zip(names, epochs, strict=True)), limits)


# --- the shuffle ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ShardJob:
    """A file of the output."""

    number: int
    size_bytes: int
    folder: str
    scratch: str

    @property
    def label(self) -> str:
        """Its number."""
        return f"{self.number:05d}"

    def final_names(self) -> tuple[str, ...]:
        """Its name."""
        return (f"{DOCUMENTS}-{self.label}.jsonl",)


def _scatter(
    config: MixConfig,
    stage: StageRun,
    jobs: Sequence[MixJob],
    files: Sequence[Sequence[UnitFile]],
    plan: MixPlan,
    sources: dict[str, Source],
) -> list[ShardJob]:
    """Put every document into the piece of its unit, and tell workers where the shards are."""
    folder = stage.work.url("pieces")
    own = [replace(job, folder=folder, sizes=one) for job, one in zip(jobs, files, strict=True)]
    plan.write(stage.scratch)
    found = run_units(stage, own, scatter_unit, config.workers, "scatter", lambda _: ())
    pieces, bounds = [], []
    for job, facts in zip(own, found, strict=True):
        sources[job.source].mixed_documents += facts["documents"]
        sources[job.source].mixed_size += facts["size"]
        for i, ends in enumerate(facts["pieces"]):
            pieces.append(store.join(folder, f"piece-{job.number:05d}-{i:03d}"))
            bounds.append(ends)
    table = np.array(bounds, np.int64).reshape(-1, plan.num_shards + 1)
    np.save(stage.scratch / BOUNDS, table)
    (stage.scratch / PIECES).write_text("\n".join(pieces))
    assert stage.output is not None
    sizes = np.diff(table, axis=1).sum(axis=0).tolist()
    place = (stage.output.url, str(stage.scratch))
    return [ShardJob(number, size, *place) for number, size in enumerate(sizes)]


def write_shard(job: ShardJob) -> UnitDone:
    """Sort the documents of a shard and write them, in a worker; equal keys by the line."""
    scratch = Path(job.scratch)
    bounds = np.load(scratch / BOUNDS, mmap_mode="r")
    documents: list[tuple[int, bytes]] = []
    for url, ends in zip((scratch / PIECES).read_text().splitlines(), bounds, strict=True):
        start, end = int(ends[job.number]), int(ends[job.number + 1])
        if start < end:
            documents += parse_block(store.read_range(url, start, end))
    documents.sort()
    (name,) = job.final_names()
    with store.open_output(store.join(job.folder, name), name) as out:
        for i in range(0, len(documents), 1024):
            out.write(b"".join(line for _, line in documents[i : i + 1024]))
    return UnitDone((out.record,), {})


def _report(config: MixConfig, sources: dict[str, Source], num_shards: int) -> dict[str, Any]:
    before = sum(one.size for one in sources.values())
    after = sum(one.mixed_size for one in sources.values())
    return {
        "count": config.count,
        "seed": config.seed,
        "shards": num_shards,
        "documents": sum(one.mixed_documents for one in sources.values()),
        "size": after,
        "sources": {
            name: {
                "documents": one.documents,
                "size": one.size,
                "share": round(one.size / before, 6),
                "bad_lines": one.bad_lines,
                "epochs": one.epochs,
                "mixed_documents": one.mixed_documents,
                "mixed_size": one.mixed_size,
                "mixed_share": round(one.mixed_size / max(after, 1), 6),
            }
            for name, one in sources.items()
        },
    }
