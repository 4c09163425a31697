"""The chunk database of token files that were not merged."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from stages.merge.config import MergeConfig
from stages.merge.run import run as merge
from tests.stages.directly import run_directly
from tests.stages.test_retro_db import files
from tests.trainyard.retrieval.corpora import build, write_two
from trainyard.retrieval.chunk_database import ChunkDatabase


@pytest.mark.slow
def test_a_virtual_dataset_gives_the_database_of_the_merged_pair(tmp_path: Path) -> None:
    parts, found = write_two(tmp_path), []
    for name, is_virtual in (("merged", False), ("virtual", True)):
        folder = tmp_path / name
        prefix = str(folder / "all")
        run_directly(MergeConfig, merge, input=parts, output_prefix=prefix, virtual=is_virtual)
        build(folder, [prefix], retro_doc_block_size=3)
        database = ChunkDatabase(str(folder / "db"), [prefix])
        every = np.arange(len(database))
        tokens = [database.tokens(chunk).tolist() for chunk in every]
        found.append((files(folder), tokens, database.token_rows(every, 5, -1).tolist()))
    assert found[0] == found[1]
