"""Chunks that no sample may retrieve: --retro-exclude-evaluation; and the database with the tokens
that this needs."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from stages.faiss_query.config import FaissQueryConfig
from trainyard.corpus.indexed import IndexedDataset
from trainyard.errors import ConfigError
from trainyard.retrieval.chunk_database import ChunkDatabase
from trainyard.retrieval.database_sources import prefixes_of_all
from trainyard.retrieval.evaluation_overlap import RunsOfTokens, repeating_chunks

log = logging.getLogger(__name__)


def database_with_tokens(
    config: FaissQueryConfig, prefixes: Sequence[str], pairs: Sequence[tuple[int, int]]
) -> ChunkDatabase | None:
    """The database, opened with the token files that it was cut from; None if they are neither
    given nor all among those of the samples.

    prefixes, pairs: the token files of the samples, and which dataset of the database each is."""
    given = list(config.retro_db_data_path) or prefixes_of_all(config.retro_db, prefixes, pairs)
    return None if given is None else ChunkDatabase(config.retro_db, given)


def excluded_chunks(
    config: FaissQueryConfig, database: ChunkDatabase | None
) -> NDArray[np.bool_] | None:
    """(chunks of the database,) those that repeat an evaluation set; None without sets.

    database: see `database_with_tokens`."""
    if not config.retro_exclude_evaluation:
        return None
    if database is None:
        raise ConfigError(
            "--retro-exclude-evaluation compares the tokens of the database, and the samples do "
            "not have all of its token files; name them with --retro-db-data-path"
        )
    files = [IndexedDataset(prefix) for prefix in config.retro_exclude_evaluation]
    runs = RunsOfTokens(files, config.retro_exclude_run)
    if not len(runs):
        raise ConfigError(
            f"--retro-exclude-evaluation: no document has {config.retro_exclude_run} tokens, so "
            "nothing would be excluded; lower --retro-exclude-run"
        )
    if runs.num_short:
        log.warning(
            "%d documents of the evaluation sets have fewer than %d tokens and exclude nothing; "
            "lower --retro-exclude-run for them",
            *(runs.num_short, config.retro_exclude_run),
        )
    excluded = repeating_chunks(database, runs)
    log.info("chunks that repeat evaluation sets=%d of %d", excluded.sum(), len(database))
    return excluded
