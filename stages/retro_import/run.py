"""Check the old project, then copy its parts under the names of ours."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, replace
from typing import Any

from stages.retro_import.config import RetroImportConfig
from stages.retro_import.index import CheckedIndex, check_index
from stages.retro_import.sources import open_source, source_index
from stages.retro_import.tables import CheckedTable, check_table
from stages.runtime.context import StageRun
from stages.runtime.finished_files import copy_file
from trainyard.artifacts import store
from trainyard.artifacts.digest import digest_files
from trainyard.artifacts.urls import canonical, join
from trainyard.datasets.config import SPLIT_NAMES
from trainyard.errors import ConfigError
from trainyard.retrieval.chunk_database import ChunkDatabase
from trainyard.retrieval.database_check import check_database
from trainyard.retrieval.database_sources import find_datasets
from trainyard.retrieval.index_document import ADDED, DOCUMENT, EMPTY
from trainyard.retrieval.project import (
    CONFIG,
    DATABASE,
    EMPTY_INDEX,
    INDEX,
    QUERY,
    Project,
    with_data,
)
from trainyard.retrieval.project_copy import (
    Files,
    database_files,
    token_files,
    tokenizer_files,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Checked:
    """The parts of an old project."""

    project: Project
    database: ChunkDatabase
    index: CheckedIndex | None
    tables: dict[str, CheckedTable]
    """By split."""


def run(config: RetroImportConfig, stage: StageRun) -> dict[str, Any]:
    """Write the project."""
    old = _check(config, stage)
    files = _files(old, config.copy_data)
    size = sum(store.info(url).size_bytes for url in files.values())
    with stage.progress(size, "bytes", "copy") as progress:
        for name, url in files.items():
            copy_file(stage, url, name, on_bytes=progress.update)
    if old.index is not None:
        stage.write_json(join(INDEX, DOCUMENT), old.index.document.to_document())
        if old.index.empty is not None:
            stage.write_json(join(EMPTY_INDEX, DOCUMENT), old.index.empty.to_document())
    database, index = _digest(stage, DATABASE), _digest(stage, INDEX)
    for split, table in old.tables.items():
        table.write(stage, join(QUERY, split), database, index)
    # Its names are those of this place, and stages add folders of neighbours to it.
    text = json.dumps(_options(old, config.copy_data), indent=4) + "\n"
    stage.write_text(CONFIG, text, volatile=True)
    metrics = {
        "chunks": len(old.database),
        "vectors": 0 if old.index is None else old.index.document.num_vectors,
        **{f"{split}_chunks": table.document.num_chunks for split, table in old.tables.items()},
    }
    log.info("imported %s", " ".join(f"{key}={value}" for key, value in metrics.items()))
    return metrics


def _check(config: RetroImportConfig, stage: StageRun) -> Checked:
    """Read every part of the old project, and refuse what cannot be."""
    project = open_source(config.retro_project_dir, config.retro_gpt_data_path)
    database = ChunkDatabase(project.database, project.prefixes())
    check_database(project.database, project.config.retro_gpt_chunk_length)
    pairs = find_datasets(project.database, project.prefixes())
    places = [place for place, _ in pairs]
    if places != list(range(len(database.infos))):
        raise ConfigError(
            f"{join(project.url, CONFIG)}: retro_gpt_data_path does not name the token files of "
            f"{project.database} in its order; give them by --retro-gpt-data-path"
        )
    found = source_index(project, config.retro_index_file)
    index = None if found is None else check_index(project, found, database, stage.scratch)
    nprobe = 1 if index is None else index.document.nprobe
    tables = {
        split: check_table(project, split, database, pairs, nprobe) for split in project.splits()
    }
    return Checked(project, database, index, tables)


def _files(old: Checked, has_data: bool) -> Files:
    """What is copied as it is."""
    files = database_files(old.project) | tokenizer_files(old.project)[1]
    if old.index is not None:
        files[join(INDEX, ADDED)] = old.index.url
        if old.index.empty_url is not None:
            files[join(EMPTY_INDEX, EMPTY)] = old.index.empty_url
    return files | (token_files(old.project, old.database.infos) if has_data else {})


def _options(old: Checked, has_data: bool) -> dict[str, Any]:
    """Of the new project."""
    names = [canonical(prefix) for prefix in old.project.prefixes()]
    if has_data:
        names = [info.prefix for info in old.database.infos]
    folders = {split: split if split in old.tables else None for split in SPLIT_NAMES}
    config = replace(tokenizer_files(old.project)[0], retro_neighbor_dirs=folders)
    return with_data(replace(old.project, config=config), names).config.to_document()


def _digest(stage: StageRun, folder: str) -> str:
    """What `inputs.resolve` says of a folder of the output; empty without files there."""
    begin = f"{folder}/"
    files = [record for record in stage.records.values() if record.path.startswith(begin)]
    if not files:
        return ""
    return digest_files((f.path.removeprefix(begin), f.size_bytes, f.digest) for f in files)
