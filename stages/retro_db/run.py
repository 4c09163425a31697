"""Cut all blocks that are not done yet, or those of a share, then merge them."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from itertools import count
from typing import Any

import numpy as np

from stages.retro_db.base import open_base, read_listed_block
from stages.retro_db.blocks import (
    CutJob,
    DocumentBlock,
    bert_tokenizer,
    cut_job,
    cut_jobs,
    gpt_tokenizer,
    open_tokens,
    plan_blocks,
    version_of,
)
from stages.retro_db.config import RetroDbConfig
from stages.retro_db.validate import validate
from stages.runtime.context import StageRun
from stages.runtime.finished_files import finish_file, finished_file, move_file
from stages.runtime.joined_shares import share_manifests
from trainyard.artifacts import inputs
from trainyard.corpus.indexed import IndexedDataset
from trainyard.corpus.workers import Crew, run_jobs
from trainyard.datasets.vocabulary import check_tokens, refuse_floats
from trainyard.errors import ArtifactError, ConfigError, DataError
from trainyard.machine import available_cores
from trainyard.retrieval.chunks import Block as ChunkBlock
from trainyard.retrieval.chunks import Rows, block_of
from trainyard.retrieval.dataset_infos import INFOS, DatasetInfo, num_sampled
from trainyard.retrieval.hdf5 import MERGED, MergedWriter, merged_name, read_block, write_block
from trainyard.retrieval.sampling import sample_chunks

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Corpus:
    """A dataset of the blend, and the counts of its blocks once they are done."""

    prefix: str
    name: str
    weight: float | None
    tokens: IndexedDataset
    num_train_documents: int
    blocks: list[DocumentBlock]
    counts: dict[DocumentBlock, dict[str, int]]

    def count(self, kind: str) -> int:
        """Chunks of all blocks: valid, invalid or train."""
        return sum(counts[kind] for counts in self.counts.values())


def run(config: RetroDbConfig, stage: StageRun) -> dict[str, Any]:
    """Write the blocks of every dataset, the merged databases, and what they contain; with --rank
    only some of the blocks."""
    began = time.monotonic()
    config = replace(config, tokenizer=replace(config.tokenizer, use_gigatoken=False))
    gpt = gpt_tokenizer(config.tokenizer)
    _ = gpt.eod  # an error before any work for a model without one
    bert_tokenizer(config.bert())
    corpora = _open(config, gpt.vocab_size)
    if config.retro_task_validate is not None:
        return validate(config, stage, [block for corpus in corpora for block in corpus.blocks])
    if config.world_size is not None and config.rank is None:
        _join(config, stage, corpora)
    else:
        _leave_to_others(config, corpora)
        if config.retro_base_db is not None:
            _take_over(config, stage, corpora)
        _cut(config, stage, corpora)
    if config.rank is not None:
        return {"blocks": sum(len(corpus.blocks) for corpus in corpora)}
    infos = _count(config, corpora)
    _merge(config, stage, corpora, infos)
    stage.write_json(INFOS, [asdict(info) for info in infos])
    metrics = {
        "datasets": len(infos),
        "documents": sum(info.n_docs for info in infos),
        "chunks": sum(info.n_chunks for info in infos),
        "train_chunks": sum(info.n_chunks_train for info in infos),
        "invalid_chunks": sum(info.n_chunks_invalid for info in infos),
        "sampled_chunks": sum(info.n_chunks_sampled for info in infos),
    }
    counts = " ".join(f"{key}={value}" for key, value in metrics.items())
    log.info("built %s seconds=%.1f", counts, time.monotonic() - began)
    return metrics


def _open(config: RetroDbConfig, vocab_size: int) -> list[Corpus]:
    """Every corpus, checked."""
    sources = config.sources()
    corpora = []
    for number, (source, name) in enumerate(zip(sources, config.names(), strict=True)):
        prefix, tokens = source.prefix, open_tokens(source.prefix, version_of(source.prefix))
        refuse_floats(tokens)
        num_documents = tokens.num_documents
        if not tokens.sequence_lengths.any():
            raise ArtifactError(
                f"--data-path {prefix}: no token in {num_documents} documents, so there is nothing "
                "to cut; leave it out"
            )
        num_train = int(config.train_fraction() * num_documents)
        if num_train == 0:
            raise ConfigError(
                f"--retro-gpt-split {config.retro_gpt_split!r} leaves none of the {num_documents} "
                f"documents of {prefix} for training, so none for the database; 100,0,0 takes all"
            )
        check_tokens(IndexedDataset(prefix), vocab_size, len(sources))  # mapped: all tokens
        blocks = plan_blocks(number, name, num_documents, config.retro_doc_block_size)
        corpora.append(Corpus(prefix, name, source.weight, tokens, num_train, blocks, {}))
    return corpora


# --- blocks -----------------------------------------------------------------------------------


def _cut(config: RetroDbConfig, stage: StageRun, corpora: Sequence[Corpus]) -> None:
    """Write every block that no killed run has finished."""
    jobs: dict[DocumentBlock, list[CutJob]] = {}
    done = 0
    for corpus in corpora:
        version = version_of(corpus.prefix)
        for block in corpus.blocks:
            if block in corpus.counts:  # taken over
                continue
            if _is_finished(stage, corpus, block):
                done += 1
                continue
            jobs[block] = cut_jobs(config, corpus.tokens, block, corpus.prefix, version)
    if done:
        log.info("resuming: blocks_done=%d blocks=%d", done, done + len(jobs))
    found: dict[DocumentBlock, dict[int, Rows]] = defaultdict(dict)
    cores = available_cores()
    crew = Crew.of(min(config.workers or cores, cores), side_by_side=True)
    threads = {"TOKENIZERS_PARALLELISM": "false"}  # the crew is the parallelism
    flat = [job for block in jobs.values() for job in block]
    total = sum(job.num_tokens for job in flat)
    began, tokens_done = time.monotonic(), 0
    at_once = max(crew.processes, 1) * crew.threads
    with stage.progress(total, "tokens", "retro_db") as progress:
        for number, (job, rows) in enumerate(run_jobs(cut_job, flat, crew, threads), 1):
            progress.update(job.num_tokens)
            tokens_done += job.num_tokens
            if number == min(at_once, len(flat)):  # each worker has done about one
                minutes = (time.monotonic() - began) / 60 * total / max(tokens_done, 1)
                log.info("cutting tokens=%d estimated_minutes=%.1f", total, minutes)
            mine = found[job.block]
            mine[job.first] = rows
            if len(mine) == len(jobs[job.block]):
                whole = np.concatenate([mine[first] for first in sorted(mine)])
                _write_block(stage, corpora[job.block.dataset], job.block, whole)
                del found[job.block]


def _rank_of(config: RetroDbConfig, number: int) -> int:
    """The share that cuts the n-th block of all datasets."""
    return number % (config.world_size or 1)


def _leave_to_others(config: RetroDbConfig, corpora: Sequence[Corpus]) -> None:
    """Drop the blocks of other shares."""
    numbers = count()
    for corpus in corpora:
        owned = [(block, _rank_of(config, next(numbers))) for block in corpus.blocks]
        corpus.blocks = [block for block, rank in owned if config.rank in (None, rank)]


def _join(config: RetroDbConfig, stage: StageRun, corpora: Sequence[Corpus]) -> None:
    """Copy the blocks of all shares."""
    shares = config.all_shares()
    manifests = share_manifests(stage, shares, "retro_db")
    blocks = [(corpus, block) for corpus in corpora for block in corpus.blocks]
    with stage.progress(len(blocks), "blocks", "join") as progress:
        for number, (corpus, block) in enumerate(blocks):
            if not _is_finished(stage, corpus, block):
                rank = _rank_of(config, number)
                record = manifests[rank].record(block.name)
                held = read_listed_block(shares[rank].url, block.name, record, stage.scratch)
                _write_held(stage, corpus, block, held)
            progress.update(1)


def _take_over(config: RetroDbConfig, stage: StageRun, corpora: Sequence[Corpus]) -> None:
    """Copy the blocks of the datasets that a finished database has."""
    assert config.retro_base_db is not None
    base = open_base(config, stage, [corpus.prefix for corpus in corpora])
    taken = 0
    for corpus, name in zip(corpora, base.names, strict=False):
        for block in corpus.blocks:
            if not _is_finished(stage, corpus, block):
                held = base.read(block, name, corpus.tokens.num_documents, stage.scratch)
                _write_held(stage, corpus, block, held)
            taken += 1
    log.info("taken from --retro-base-db datasets=%d blocks=%d", len(base.names), taken)


def _is_finished(stage: StageRun, corpus: Corpus, block: DocumentBlock) -> bool:
    counts = finished_file(stage, block.key)
    if counts is not None:
        corpus.counts[block] = counts
    return counts is not None


def _write_block(stage: StageRun, corpus: Corpus, block: DocumentBlock, rows: Rows) -> None:
    """rows: all chunks of the block, in order."""
    _write_held(stage, corpus, block, block_of(rows, block.first, block.last))


def _write_held(stage: StageRun, corpus: Corpus, block: DocumentBlock, held: ChunkBlock) -> None:
    path = stage.scratch / "block.hdf5"
    write_block(path, held)
    record = move_file(stage, path, block.name)
    corpus.counts[block] = {
        "valid": len(held.chunks_valid),
        "invalid": len(held.chunks_invalid),
        "train": int((held.chunks_valid[:, 0] < corpus.num_train_documents).sum()),
    }
    finish_file(stage, block.key, record, corpus.counts[block])


def _read_block(stage: StageRun, block: DocumentBlock) -> ChunkBlock:
    assert stage.output is not None
    url = stage.output.file_url(block.name)
    path = inputs.fetch(url, stage.scratch)
    held = read_block(path, url)
    if path.parent == stage.scratch:
        path.unlink()
    return held


# --- merged databases -------------------------------------------------------------------------


def _count(config: RetroDbConfig, corpora: Sequence[Corpus]) -> list[DatasetInfo]:
    """The counts of every dataset. Raises DataError for one without a training chunk."""
    for corpus in corpora:
        if not corpus.count("train"):
            raise DataError(
                f"{corpus.prefix}: no chunk of its {corpus.num_train_documents} training documents "
                f"has a BERT token ({corpus.count('invalid')} chunks have none), so it has no "
                "chunk to retrieve; is it text? Leave it out of --data-path"
            )
    # Without weights the sample is uniform over all datasets.
    ratios = [c.weight if c.weight is not None else float(c.count("train")) for c in corpora]
    infos, ntrain = [], config.retro_index_ntrain
    for corpus, ratio in zip(corpora, ratios, strict=True):
        wanted, num_train = num_sampled(ntrain, ratio, sum(ratios)), corpus.count("train")
        if wanted > num_train:
            log.warning(
                "--retro-index-ntrain %d: %d chunks of %s are to be sampled, which has only %d for "
                "training; taking all of them",
                *(ntrain, wanted, corpus.name, num_train),
            )
        infos.append(
            DatasetInfo(
                ratio=ratio,
                prefix=corpus.name,
                n_docs=corpus.tokens.num_documents,
                n_docs_train=corpus.num_train_documents,
                n_chunks=corpus.count("valid"),
                n_chunks_train=num_train,
                n_chunks_invalid=corpus.count("invalid"),
                n_chunks_sampled=min(wanted, num_train),
            )
        )
    return infos


def _merge(
    config: RetroDbConfig,
    stage: StageRun,
    corpora: Sequence[Corpus],
    infos: Sequence[DatasetInfo],
) -> None:
    """Write the merged databases, reading each block once."""
    sampled = sum(info.n_chunks_sampled for info in infos)
    train = sum(info.n_chunks_train for info in infos)
    valid = sum(info.n_chunks for info in infos) - train
    train_documents = sum(info.n_docs_train for info in infos)
    paths = [stage.scratch / f"{kind}.hdf5" for kind in MERGED]
    with ExitStack() as stack:
        to_sampled, to_train, to_valid = (
            stack.enter_context(MergedWriter(path, num_chunks, num_documents))
            for path, num_chunks, num_documents in zip(
                paths, (sampled, train, valid), (None, train_documents, None), strict=True
            )
        )
        for number, (corpus, info) in enumerate(zip(corpora, infos, strict=True)):
            seed = (config.retro_sample_seed, number)
            chosen = sample_chunks(
                info.n_chunks_train, info.n_chunks_sampled, config.retro_sample_mode, seed
            )
            before = 0
            for block in corpus.blocks:
                held = _read_block(stage, block)
                split = corpus.counts[block]["train"]
                documents = max(0, min(info.n_docs_train, block.last) - block.first)
                to_train.append(number, held.chunks_valid[:split], held.doc_offsets[:documents])
                to_valid.append(number, held.chunks_valid[split:])
                low, high = np.searchsorted(chosen, (before, before + split))
                to_sampled.append(number, held.chunks_valid[chosen[low:high] - before])
                before += split
    for path, kind in zip(paths, MERGED, strict=True):
        move_file(stage, path, merged_name(kind))
