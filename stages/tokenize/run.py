"""Cut the input into units, tokenize those that are not done yet, lay them end to end."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

from stages.runtime.context import StageRun
from stages.runtime.share_digests import files_to_digest, write_blocks
from stages.tokenize.assemble import Assembly, Totals
from stages.tokenize.config import TokenizeConfig
from stages.tokenize.shares import check_files, join_shares, write_share
from stages.tokenize.unit import TokenizeJob, cached_splitter, cached_tokenizer, tokenize_unit
from trainyard.artifacts import store
from trainyard.artifacts.inputs import check_all_listed
from trainyard.artifacts.store import FileInfo
from trainyard.corpus.documents import check_inputs
from trainyard.corpus.indexed import optimal_dtype
from trainyard.corpus.units import InputFile, Unit, look_at, plan_units, share_of
from trainyard.corpus.workers import Crew, run_jobs
from trainyard.errors import ConfigError
from trainyard.machine import available_cores
from trainyard.tokenizers.base import Tokenizer

log = logging.getLogger(__name__)

LINE_SECONDS = 1.0

FEW_BYTES = 96 << 20
"""Of a worker: what gigatoken encodes in less time than a further process takes to start."""

WAITING = 2
"""Threads for each that computes, where the others wait for a store."""


def run(config: TokenizeConfig, stage: StageRun) -> dict[str, Any]:
    """Write PREFIX_KEY_document.bin, .idx and .docs for every key, or the share of a rank."""
    began = time.monotonic()
    files = check_inputs(config.input, stage.inputs["input"].files, config.json_keys)
    _refuse_to_remove(config, stage)
    tokenizer = cached_tokenizer(config.tokenizer)  # raises its errors before any work
    if config.append_eod:
        _ = tokenizer.eod  # an error before any work for a model without one
    sizes = look_at(files)
    if config.world_size is not None:
        check_files(files)
    if config.world_size is not None and config.rank is None:
        totals = join_shares(config, stage, files)
        size = sum(file.size_bytes for file in sizes)
    else:
        units = _units(config, sizes)
        begun = {source.url for unit in units for source in unit.sources if source.start == 0}
        check_all_listed(begun)  # by one share each
        totals = _tokenize(config, stage, sizes, units, tokenizer)
        size = sum(unit.size_bytes for unit in units)
    num_empty = sum(not file.size_bytes for file in sizes)
    return _metrics(size, num_empty, totals, tokenizer, time.monotonic() - began)


def _refuse_to_remove(config: TokenizeConfig, stage: StageRun) -> None:
    """A prefix is one artifact: token files of other keys would go with their manifest."""
    mine = {config.file_stem(key) + ".bin" for key in config.json_keys}
    earlier = {path for path in (stage.slot.files if stage.slot else ()) if path.endswith(".bin")}
    if earlier - mine and not stage.is_forced:
        lost = config.output_prefix + sorted(earlier - mine)[0]
        raise ConfigError(
            f"--output-prefix {config.output_prefix}: {lost} of an earlier run exists, and this "
            "run would remove it, as it makes other files; give another --output-prefix, name all "
            "keys in one run (--json-keys), or remove it with --force"
        )


def _metrics(
    size: int, num_empty: int, totals: Totals, tokenizer: Tokenizer, seconds: float
) -> dict[str, Any]:
    log.info(
        "tokenized documents=%d tokens=%d seconds=%.2f mb_per_second=%.1f engine=%r bad_lines=%d",
        totals.documents,
        sum(totals.tokens.values()),
        seconds,
        size / max(seconds, 1e-9) / 1e6,
        tokenizer.engine,
        totals.bad_lines,
    )
    return {
        "documents": totals.documents,
        "sequences": totals.sequences,
        "tokens": totals.tokens,
        "bad_lines": totals.bad_lines,
        "validated_documents": totals.validated,
        "input_bytes": size,
        "empty_files": num_empty,
        "engine": tokenizer.engine,
        "vocab_size": tokenizer.vocab_size,
    }


def _units(config: TokenizeConfig, sizes: Sequence[InputFile]) -> list[Unit]:
    """All units, or those of a share."""
    units = plan_units(sizes, world_size=config.world_size)
    if config.rank is None or config.world_size is None:
        return units
    return share_of(units, config.rank, config.world_size)


def _tokenize(
    config: TokenizeConfig,
    stage: StageRun,
    sizes: Sequence[InputFile],
    units: Sequence[Unit],
    tokenizer: Tokenizer,
) -> Totals:
    work_url = stage.work.url("packs")
    copies = None if store.is_local(work_url) else str(stage.scratch / "copies")
    if copies is not None:
        (stage.scratch / "copies").mkdir()
    scratch = str(stage.scratch)
    crew, computing = _crew(config, sizes, copies, tokenizer)
    stage.facts["workers"] = max(crew.processes, 1) * computing
    digested = _to_digest(config, sizes, units)
    jobs = [
        TokenizeJob(
            *(unit, config, work_url, copies, scratch, computing),
            tuple(digested[s.url].size_bytes if s.url in digested else 0 for s in unit.sources),
        )
        for unit in units
    ]
    there = stage.work.names()
    finished = {job.unit.name for job in jobs if f"packs/{job.packs[0]}" in there}
    dtype = optimal_dtype(tokenizer.vocab_size)
    with Assembly(config, stage, jobs, dtype) as assembly:
        _work(config, stage, jobs, finished, assembly, crew)
        totals = assembly.finish()
    if config.rank is not None:
        write_share(stage, totals)
        write_blocks(stage, digested, assembly.digests)
    return totals


def _to_digest(
    config: TokenizeConfig, sizes: Sequence[InputFile], units: Sequence[Unit]
) -> dict[str, FileInfo]:
    """The files of which a share digests blocks as it reads its units."""
    if config.rank is None:
        return {}
    mine = (sizes[number] for number in sorted({n for unit in units for n in unit.files}))
    return files_to_digest((file.url, FileInfo(file.size_bytes, file.version)) for file in mine)


def _crew(
    config: TokenizeConfig, sizes: Sequence[InputFile], copies: str | None, tokenizer: Tokenizer
) -> tuple[Crew, int]:
    """The workers, and how many threads of a process compute at once."""
    cores = available_cores()
    workers = config.workers or cores
    if workers > cores:
        log.info("--workers %d is lowered to %d, the cores this process may use", workers, cores)
        workers = cores
    cached_splitter(config)  # raises errors of its model before any work
    size_bytes = sum(file.size_bytes for file in sizes)
    # Two threads take turns in gigatoken, which is so fast that little input needs no more.
    is_little = workers == 2 and size_bytes < FEW_BYTES * workers
    is_done_soon = is_little and tokenizer.engine.startswith("gigatoken")
    side_by_side = (tokenizer.releases_gil or is_done_soon) and not config.split_sentences
    is_remote = copies is not None or not all(store.is_local(file.url) for file in sizes)
    crew = Crew.of(workers, side_by_side)
    if not is_remote:
        return crew, crew.threads
    return Crew(crew.processes, WAITING * crew.threads), crew.threads


def _work(
    config: TokenizeConfig,
    stage: StageRun,
    jobs: Sequence[TokenizeJob],
    finished: set[str],
    assembly: Assembly,
    crew: Crew,
) -> None:
    todo = [job for job in jobs if job.unit.name not in finished]
    if finished:
        log.info("resuming: units_done=%d units=%d", len(finished), len(jobs))
    total, left = (sum(job.unit.size_bytes for job in some) for some in (jobs, todo))
    speed = _Speed(config.log_interval)
    threads = {"TOKENIZERS_PARALLELISM": "false"}  # the crew is the parallelism
    with stage.progress(total, "bytes", "tokenize", start=total - left) as progress:
        for job, documents in run_jobs(tokenize_unit, todo, crew, threads):
            finished.add(job.unit.name)
            progress.update(job.unit.size_bytes)
            speed.add(documents, job.unit.size_bytes)
            assembly.catch_up(finished)
        assembly.catch_up(finished)


class _Speed:
    """Logs progress every so many documents, like Megatron's tool, at most once a second."""

    def __init__(self, log_interval: int) -> None:
        self._interval = log_interval
        self._documents = self._bytes = self._logged = 0
        self._began = self._last = time.monotonic()

    def add(self, documents: int, size_bytes: int) -> None:
        """Some more is done."""
        self._documents += documents
        self._bytes += size_bytes
        now = time.monotonic()
        if self._documents - self._logged >= self._interval and now - self._last >= LINE_SECONDS:
            self._logged, self._last = self._documents, now
            seconds = now - self._began
            log.info(
                "tokenized documents=%d documents_per_second=%.0f mb_per_second=%.2f",
                self._documents,
                self._documents / seconds,
                self._bytes / seconds / 1e6,
            )
