"""Embed all blocks that are not done yet: text, tokens, vectors, a file each."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from stages.retro_embed.blocks import Block, Ranks, begin, of_share, plan_blocks, wait_for
from stages.retro_embed.chunk_options import DatabaseChunks
from stages.retro_embed.config import RetroEmbedConfig
from stages.retro_embed.shares import join_shares
from stages.retro_embed.texts import Texts, open_texts, write_samples
from stages.retro_embed.tokenizers import check_vocabulary
from stages.retro_embed.validate import validate
from stages.runtime.context import StageRun
from stages.runtime.disk_space import check_disk
from stages.runtime.finished_files import finish_file, finished_file
from trainyard.artifacts import store
from trainyard.corpus.workers import Crew, run_jobs
from trainyard.embedding.embedder import BertEmbedder, Embedder
from trainyard.embedding.encoder import load_encoder
from trainyard.embedding.user import load_user_embedder
from trainyard.embedding.word_pieces import find_tokenizer
from trainyard.errors import DataError
from trainyard.machine import available_cores
from trainyard.parallel.device import resolve_device
from trainyard.retrieval.vectors import Vectors, write_block

log = logging.getLogger(__name__)

AHEAD = Crew(processes=0, threads=1)
"""Texts of the next block become tokens while this one is computed."""

FEWEST_PROBED, MOST_PROBED = 8, 8192
"""Chunks whose embedding is timed to estimate that of all."""

PROBE_SECONDS = 0.5
"""Such a time can be scaled: what a call takes beside its chunks is little of it."""

Made = tuple[Block, int, Vectors]
"""A block, its BERT tokens, its vectors."""


def run(config: RetroEmbedConfig, stage: StageRun) -> dict[str, Any]:
    """Write the blocks, or those of a share or rank; join shares; or compare a sample of blocks."""
    began = time.monotonic()
    texts = open_texts(config, stage)
    blocks = plan_blocks(len(texts), config.retro_block_size)
    if config.world_size is not None and config.rank is None:
        sums = join_shares(config, stage, blocks)
        write_samples(stage, texts.chunks)
        return {"chunks": len(texts), **sums}
    ranks = Ranks.of_environment()
    if config.retro_task_validate is not None:
        if ranks.rank > 0:
            return {}
        embedder = build_embedder(config, stage, ranks)
        return validate(config, stage, blocks, partial(_vectors, texts=texts, embedder=embedder))
    mine = of_share(config, blocks)
    embedder = build_embedder(config, stage, ranks)
    own = mine[ranks.rank :: ranks.count]
    # Looked up before the beginning: at the end, rank 0 removes what says so.
    todo = [block for block in own if finished_file(stage, block.key) is None]
    # On every rank: one that did not see the refusal would wait for the others.
    missing = sum(len(block) for block in mine if finished_file(stage, block.key) is None)
    check_disk(
        stage,
        missing * embedder.dimensions * 4,
        f"{missing:,} embeddings of {embedder.dimensions} dimensions",
        "free some, or write to another disk or an object store",
    )
    if begin(stage, ranks, mine):
        _embed(stage, own, todo, texts, embedder)
    if ranks.rank > 0:
        return {}
    facts = wait_for(stage, mine)
    if config.rank is None:
        write_samples(stage, texts.chunks)
    seconds = time.monotonic() - began
    metrics = {
        "chunks": sum(map(len, mine)),
        "tokens": sum(fact["tokens"] for fact in facts),
        "dimensions": embedder.dimensions,
        "seconds": round(seconds, 3),
    }
    log.info("embedded %s", " ".join(f"{key}={value}" for key, value in metrics.items()))
    return metrics


def build_embedder(config: RetroEmbedConfig, stage: StageRun, ranks: Ranks) -> Embedder[Any]:
    """The embedder that the options name, on the device of this rank."""
    if config.load is None:
        assert config.embedder is not None
        return load_user_embedder(config.embedder)
    device = resolve_device(config.device, ranks.local_rank)
    encoder = load_encoder(config.load, device, config.embedding)
    tokenizer = find_tokenizer(encoder, config.bert(), stage.scratch)
    if isinstance(config.source, DatabaseChunks):
        check_vocabulary(config.source, tokenizer.config)
    workers = config.workers or max(available_cores() // ranks.local_count, 1)
    return BertEmbedder(encoder, tokenizer, config.embedding, workers)


def _embed(
    stage: StageRun,
    blocks: Sequence[Block],
    todo: Sequence[Block],
    texts: Texts,
    embedder: Embedder[Any],
) -> None:
    """Write those blocks of this rank that no killed run has finished."""
    if len(todo) < len(blocks):
        log.info("resuming: blocks_done=%d blocks=%d", len(blocks) - len(todo), len(blocks))
    total, left = (sum(map(len, some)) for some in (blocks, todo))
    if todo:
        _log_expected_time(todo[0], left, texts, embedder)
    last = time.monotonic()
    with stage.progress(total, "chunks", "retro_embed", start=total - left) as progress:
        for block, num_tokens, vectors in _made(todo, texts, embedder):
            _write(stage, block, num_tokens, vectors)
            progress.update(len(block))
            now = time.monotonic()
            log.info(
                "embedded chunks=%d to %d tokens=%d seconds=%.1f tokens_per_second=%.0f",
                *(block.start, block.end, num_tokens, now - last, num_tokens / (now - last)),
            )
            last = now


def _log_expected_time(block: Block, count: int, texts: Texts, embedder: Embedder[Any]) -> None:
    """Estimate the work from the first chunks of a block: twice as many until it can be timed."""
    probe = min(FEWEST_PROBED, len(block))
    # The first call also loads or compiles what computes.
    embedder.embed(embedder.prepare(texts.read(block.start, block.start + probe))[0])
    while True:
        some = texts.read(block.start, block.start + probe)
        began = time.monotonic()
        embedder.embed(embedder.prepare(some)[0])
        seconds = time.monotonic() - began
        if seconds >= PROBE_SECONDS or 2 * probe > min(len(block), MOST_PROBED):
            break
        probe *= 2
    minutes = count * seconds / probe / 60
    log.info("embedding chunks=%d estimated_minutes=%.1f", count, minutes)


def _made(blocks: Sequence[Block], texts: Texts, embedder: Embedder[Any]) -> Iterator[Made]:
    """Each block with its vectors, in order."""

    def prepare(block: Block) -> tuple[Any, int]:
        return embedder.prepare(texts.read(block.start, block.end))

    is_alone = isinstance(embedder, BertEmbedder) and embedder.device.type == "cpu"
    # On a CPU, threads that compute take all cores.
    environment = {"TOKENIZERS_PARALLELISM": "false" if is_alone else "true"}
    for block, (prepared, num_tokens) in run_jobs(prepare, blocks, AHEAD, environment):
        vectors = embedder.embed(prepared)
        _refuse_not_finite(block, vectors)
        yield block, num_tokens, vectors


def _vectors(
    blocks: Sequence[Block], texts: Texts, embedder: Embedder[Any]
) -> Iterator[tuple[Block, Vectors]]:
    for block, _, vectors in _made(blocks, texts, embedder):
        yield block, vectors


def _refuse_not_finite(block: Block, vectors: Vectors) -> None:
    bad = np.flatnonzero(~np.isfinite(vectors).all(axis=1))
    if bad.size:
        raise DataError(
            f"NaN or infinity in the vector of chunk {block.start + bad[0]}; with --fp16, numbers "
            "of the encoder may be too large for it: give --bf16, or neither"
        )


def _write(stage: StageRun, block: Block, num_tokens: int, vectors: Vectors) -> None:
    assert stage.output is not None
    path = stage.scratch / "block.hdf5"
    write_block(path, vectors)
    stage.check_claim()
    with (
        store.open_output(stage.output.file_url(block.name), block.name) as out,
        path.open("rb") as file,
    ):
        while piece := file.read(store.CHUNK):
            out.write(piece)
    path.unlink()
    stage.record(out.record)
    finish_file(stage, block.key, out.record, {"tokens": num_tokens})
