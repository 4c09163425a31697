"""Copy the parts of the project under the names of Megatron-LM."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from typing import Any

import numpy as np

from stages.retro_export.config import RetroExportConfig
from stages.retro_export.guides import write_guides
from stages.runtime.context import StageRun
from stages.runtime.finished_files import copy_file, finish_file, finished_file, move_file
from trainyard.artifacts import inputs, store
from trainyard.artifacts.store import FileRecord
from trainyard.artifacts.urls import basename, join
from trainyard.errors import ConfigError
from trainyard.retrieval.chunk_database import ChunkDatabase
from trainyard.retrieval.index_document import ADDED, DOCUMENT, EMPTY, read_index_document
from trainyard.retrieval.megatron_layout import PAR_ADD, check_share, index_files
from trainyard.retrieval.neighbors import Neighbors, block_name, write_block
from trainyard.retrieval.project import (
    CONFIG,
    INDEX,
    QUERY,
    Project,
    read_project,
    with_data,
)
from trainyard.retrieval.project_copy import (
    Files,
    database_files,
    token_files,
    tokenizer_files,
)

log = logging.getLogger(__name__)


def run(config: RetroExportConfig, stage: StageRun) -> dict[str, Any]:
    """Write the files of the chosen layout."""
    project = read_project(config.retro_project_dir)
    tables = {split: Neighbors(project.neighbors(split)) for split in project.splits()}
    if config.layout == "guides":
        return write_guides(config, stage, project, tables)
    database = ChunkDatabase(project.database, project.prefixes())
    options, tokenizers = tokenizer_files(project)
    files = {**database_files(project), **tokenizers, **_index_files(project)}
    names = [info.prefix for info in database.infos]
    if config.copy_data:
        files |= token_files(project, database.infos)
    records = _records(project)
    size = sum(store.info(url).size_bytes for url in files.values())
    with stage.progress(size, "bytes", "copy") as progress:
        for name, url in files.items():
            copy_file(stage, url, name, records.get(url), progress.update)
    for split, table in tables.items():
        folder = join(QUERY, basename(project.neighbors(split)))
        _write_table(stage, table, folder, options.retro_block_size)
    exported = with_data(replace(project, config=options), names).config
    stage.write_text(CONFIG, json.dumps(exported.to_document(), indent=4) + "\n")
    _say_what_is_missing(config, project, names)
    return {
        "chunks": len(database),
        "files": len(files),
        **{f"{split}_chunks": len(table) for split, table in tables.items()},
    }


def _index_files(project: Project) -> Files:
    """The index, trained and filled, with the document about it; nothing if there is none."""
    where = join(project.index, DOCUMENT)
    if not store.exists(where):
        return {}
    document = read_index_document(project.index)
    if document.num_shards > 1:
        raise ConfigError(
            f"{project.index} is in {document.num_shards} shards, which Megatron-LM does not read; "
            "join them: run faiss_add again without --keep-shards"
        )
    config = project.config
    names = index_files(
        config.retro_index_type or PAR_ADD,
        check_share(document.index_str),
        config.retro_index_train_load_fraction or 1.0,
        document.add_fraction,
    )
    files = {
        join(INDEX, names.added): join(project.index, ADDED),
        join(INDEX, names.folder, DOCUMENT): where,
    }
    if store.exists(join(project.empty_index, EMPTY)):
        files[join(INDEX, names.empty)] = join(project.empty_index, EMPTY)
    return files


def _records(project: Project) -> dict[str, FileRecord]:
    """What the manifests of the project's parts say, by URL."""
    return {
        join(folder, name): record
        for folder in (project.database, project.index, project.empty_index)
        for name, record in inputs.read_folder(folder).items()
    }


def _write_table(stage: StageRun, table: Neighbors, folder: str, block_size: int) -> None:
    """Write a table in blocks of the project's size, which Megatron-LM's training counts on."""
    num_chunks = len(table)
    with stage.progress(num_chunks, "chunks", folder) as progress:
        for start in range(0, num_chunks, block_size):
            stop = min(start + block_size, num_chunks)
            key = f"{folder.replace('/', '-')}-{start:015d}"
            if finished_file(stage, key) is None:
                path = stage.scratch / "block.hdf5"
                numbers = np.arange(start, stop)
                write_block(path, table.rows(numbers), table.distances(numbers))
                target = join(folder, block_name(start, stop, num_chunks))
                finish_file(stage, key, move_file(stage, path, target), {})
            progress.update(stop - start)


def _say_what_is_missing(config: RetroExportConfig, project: Project, names: list[str]) -> None:
    if not config.copy_data:
        log.info(
            "token files are not copied; before training with Megatron-LM, put each pair at "
            "%s/data/NAME.bin and .idx, or give --copy-data: %s",
            *(config.output_dir, ", ".join(names)),
        )
    if any(source.weight is None for source in project.data().sources("train")):
        log.warning(
            "config.json has no weights in retro_gpt_data_path, and Megatron-LM wants one before "
            "each name; with weights its samples have another order than these neighbours"
        )
