"""Collects documents from files: by units, resumed after a kill, in shares."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

from stages.collect.config import FETCH, HTML, JSON, WARC, WIKIPEDIA, CollectConfig
from stages.runtime.context import StageRun
from stages.runtime.document_units import (
    DOCUMENTS,
    DROPPED,
    UnitDone,
    UnitJob,
    jobs_of,
    jobs_of_share,
    run_units,
)
from stages.runtime.unit_files import UnitFiles
from stages.runtime.unit_shares import (
    join_units,
    read_tally,
    run_share,
)
from trainyard.artifacts import store
from trainyard.artifacts.block_digest import RangeDigests
from trainyard.collection.documents import UnitReader
from trainyard.collection.sources import html_files, warc, wikipedia
from trainyard.collection.sources.files import (
    SourceSplitter,
    compression_of,
    read_index,
    source_files,
)
from trainyard.collection.sources.found import Found, Sorter
from trainyard.collection.sources.html_reader import html_reader
from trainyard.collection.sources.wiki_dump import Site, read_site
from trainyard.collection.tally import Tally
from trainyard.corpus.documents import check_inputs
from trainyard.corpus.formats.records import ByteRange
from trainyard.corpus.units import look_at, plan_units
from trainyard.errors import ConfigError, DataError

log = logging.getLogger(__name__)

REPORT = "report.json"

Reader = Callable[[ByteRange, str, CollectConfig], Iterator[Found]]
"""The records of a range; of the name of its file, and the options."""


def collect_sources(config: CollectConfig, stage: StageRun) -> dict[str, Any]:
    """Write the documents of all sources but Python, or a share of them."""
    began = time.monotonic()
    indices = _indices(config, stage)
    if config.source == FETCH:
        from stages.collect.fetch import fetch_pages

        tallies = [Tally.parse(one) for one in fetch_pages(config, stage)]
    elif config.world_size is not None and config.rank is None:
        shares = config.all_shares()
        manifests = join_units(stage, shares, "collect")
        tallies = [
            read_tally(share.file_url(REPORT), manifest)
            for share, manifest in zip(shares, manifests, strict=True)
        ]
    else:
        jobs = _plan(config, stage, [offsets for offsets, _ in indices])
        run = run_units if config.rank is None else run_share
        found = run(stage, jobs, collect_unit, config.workers, "collect")
        tallies = [Tally.parse(one) for one in found]
    whole = Tally.of(())
    for tally in tallies:
        whole.add(tally, config.num_samples)
    _check_pages(sum(pages for _, pages in indices), whole, config)
    stage.write_json(REPORT, whole.document())
    if whole.documents and not whole.kept and config.rank is None:
        log.warning("no document is kept; %s says why", REPORT)
    log.info(
        "collected documents=%d of=%d seconds=%.2f",
        *(whole.kept, whole.documents, time.monotonic() - began),
    )
    return whole.metrics()


def _indices(config: CollectConfig, stage: StageRun) -> list[tuple[list[int], int]]:
    """The offsets and the number of pages of each index."""
    if not config.multistream_index:
        return []
    return [read_index(url) for url in stage.inputs["multistream_index"].files]


def _plan(
    config: CollectConfig, stage: StageRun, offsets: Sequence[Sequence[int]]
) -> list[UnitJob]:
    given = stage.inputs["input"].files
    if config.source == JSON:
        files = check_inputs(config.input, given, (config.json_key,))
        sizes = look_at(files)
        return jobs_of_share(jobs_of(stage, config, files, plan_units(sizes)), config, sizes)
    files = source_files(config.source, config.input, given)
    if offsets and len(offsets) != len(files):
        raise ConfigError(
            f"--multistream-index names {len(offsets)} files for the {len(files)} of --input; give "
            "one for each, in the same order"
        )
    if config.source == WIKIPEDIA:
        for file in files:
            site_of(file)  # raises its error before any work
    splitter = SourceSplitter(config.source, dict(zip(files, offsets, strict=bool(offsets))))
    sizes = look_at(files)
    jobs = jobs_of(stage, config, files, plan_units(sizes, splitter))
    return jobs_of_share(jobs, config, sizes, splitter)


def _check_pages(listed: int, whole: Tally, config: CollectConfig) -> None:
    """The indices list all pages, so that none can be lost in silence."""
    if config.multistream_index and config.rank is None and listed != whole.documents:
        raise DataError(
            f"--multistream-index lists {listed} pages, and the dump has {whole.documents}; one of "
            "them is not whole: fetch both again, or leave the index out"
        )


def collect_unit(job: UnitJob) -> UnitDone:
    """Collect one unit, in a worker."""
    config: CollectConfig = job.config
    if config.source == JSON:
        return _json_unit(job, config)
    sorter = Sorter(REASONS[config.source], config.num_samples)
    digests = []
    with UnitFiles(job) as files:
        for source in job.unit.sources:
            for found in READERS[config.source](source, job.names[source.url], config):
                fields, is_kept = sorter.document(found)
                files.write(DOCUMENTS if is_kept else DROPPED, fields)
            digests.append(_digests(job, source))
    return UnitDone(files.records, sorter.tally.document(), digests)


def _digests(job: UnitJob, source: ByteRange) -> list[str]:
    """Of the blocks of a range, in a share. They are read once more: the readers of these sources
    skip bytes."""
    if (file := job.digested.get(source.url)) is None:
        return []
    return RangeDigests(source.url, source.start, source.end, file.size_bytes).finish()


# --- sources ----------------------------------------------------------------------------------


@cache
def site_of(url: str) -> Site:
    """The head of a dump, read once a process."""
    return read_site(url, compression_of(url), store.info(url).size_bytes)


def _wikipedia(source: ByteRange, name: str, config: CollectConfig) -> Iterator[Found]:
    return wikipedia.wiki_documents(
        source,
        compression_of(source.url),
        name,
        site_of(source.url),
        config.namespaces,
        config.max_document_bytes,
    )


def _json_unit(job: UnitJob, config: CollectConfig) -> UnitDone:
    reader = UnitReader(
        job.unit,
        job.names,
        config.json_key,
        config.on_bad_line,
        config.max_document_bytes,
        digested=job.digested,
    )
    tally = Tally.of(())
    with UnitFiles(job) as files:
        for item in reader.items():
            tally.documents += 1
            tally.chars += len(item.fields[config.json_key])
            files.write(DOCUMENTS, item.fields)
        files.write_bad(reader.bad)
    tally.kept, tally.kept_chars, tally.bad_lines = tally.documents, tally.chars, len(reader.bad)
    return UnitDone(files.records, tally.document(), reader.digests)


def _warc(source: ByteRange, name: str, config: CollectConfig) -> Iterator[Found]:
    reader = html_reader(config.html_timeout_seconds)
    compression = compression_of(source.url)
    return warc.warc_documents(source, compression, name, reader, config.max_document_bytes)


def _html(source: ByteRange, name: str, config: CollectConfig) -> Iterator[Found]:
    reader = html_reader(config.html_timeout_seconds)
    compression = compression_of(source.url)
    return html_files.html_documents(source, compression, name, reader, config.max_document_bytes)


READERS: dict[str, Reader] = {WIKIPEDIA: _wikipedia, WARC: _warc, HTML: _html}
REASONS = {WIKIPEDIA: wikipedia.REASONS, WARC: warc.REASONS, HTML: html_files.REASONS}
