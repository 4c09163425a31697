"""Searches for a sample of blocks again, and compares the neighbours with those of a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from stages.faiss_query.config import FaissQueryConfig
from stages.faiss_query.search import BlockSearch
from stages.runtime.context import StageRun
from stages.runtime.validation import check_same_run, sample_blocks
from trainyard.artifacts import inputs
from trainyard.artifacts.output import Output
from trainyard.errors import DataError
from trainyard.retrieval.neighbors import Neighbors, block_name


def validate(
    config: FaissQueryConfig,
    stage: StageRun,
    of_block: BlockSearch,
    ranges: Sequence[tuple[int, int]],
) -> dict[str, Any]:
    """ranges: of the chunks of every block. Raises DataError for the first chunk that has other
    neighbours."""
    assert config.retro_task_validate is not None
    check_same_run(config, stage, Output.directory(config.output_dir))
    table, num_chunks = Neighbors(config.output_dir), len(of_block.rules.chunks)
    chosen = sample_blocks(len(ranges), config.retro_task_validate)
    compared = 0
    with stage.progress(len(chosen), "blocks", "validate") as progress:
        for start, stop in (ranges[number] for number in chosen):
            inputs.check_in_folder(config.output_dir, block_name(start, stop, num_chunks))
            found, _, _ = of_block.neighbors(start, stop, lambda _: None)
            same = (found == table.rows(np.arange(start, stop))).all(axis=1)
            if not same.all():
                raise DataError(
                    f"{config.output_dir}: chunk {start + int(np.argmin(same))} has other "
                    "neighbours than a search finds now; make the table again (--force)"
                )
            compared += stop - start
            progress.update(1)
    print(
        f"{config.output_dir}: {len(chosen)} of {len(ranges)} blocks searched again, "
        f"{compared:,} chunks; all neighbours are the same"
    )
    return {"blocks": len(chosen), "chunks": compared}
