"""Cuts a sample of blocks again, and compares them with those of an output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from stages.retro_db.blocks import DocumentBlock, cut_job, cut_jobs, open_tokens, version_of
from stages.retro_db.config import RetroDbConfig
from stages.runtime.context import StageRun
from stages.runtime.validation import check_same_run, sample_blocks
from trainyard.artifacts import inputs
from trainyard.artifacts.output import Output
from trainyard.errors import DataError
from trainyard.retrieval.chunks import block_of
from trainyard.retrieval.hdf5 import read_block


def validate(
    config: RetroDbConfig, stage: StageRun, blocks: Sequence[DocumentBlock]
) -> dict[str, Any]:
    """Raises DataError for the first block whose chunks are others."""
    assert config.retro_task_validate is not None
    output = Output.directory(config.output_dir)
    check_same_run(config, stage, output)
    prefixes = [source.prefix for source in config.sources()]
    chosen = sample_blocks(len(blocks), config.retro_task_validate)
    num_chunks = 0
    for block in (blocks[number] for number in chosen):
        prefix = prefixes[block.dataset]
        version = version_of(prefix)
        jobs = cut_jobs(config, open_tokens(prefix, version), block, prefix, version)
        rows = np.concatenate([cut_job(job) for job in jobs])
        url = output.file_url(block.name)
        stored = read_block(inputs.fetch(url, stage.scratch), url)
        made = block_of(rows, block.first, block.last)
        for name, values in made._asdict().items():
            if not np.array_equal(values, getattr(stored, name)):
                raise DataError(
                    f"{url}: {name} is not what the token files give; build the database again "
                    "(--force)"
                )
        num_chunks += len(rows)
    print(
        f"{config.output_dir}: {len(chosen)} of {len(blocks)} blocks cut again, {num_chunks:,} "
        "chunks; all as they were"
    )
    return {"blocks": len(chosen), "chunks": num_chunks}
