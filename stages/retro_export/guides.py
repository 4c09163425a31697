"""Single files under the names of older guides.

    NAME_bert_embeddings.h5                     dataset `data`, f32 [chunks, dimensions]
    NAME.index                                  faiss's own format
    NAME_neighbors_text_document.bin, .idx      token files of i64: a document for each sample, a
                                                sequence of k neighbours for each of its chunks

Neighbours are of the training samples; those of other splits are in NAME_valid_neighbors... and
NAME_test_neighbors..."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import h5py
import numpy as np

from stages.retro_export.config import RetroExportConfig
from stages.runtime.context import StageRun
from stages.runtime.finished_files import copy_file
from trainyard.artifacts import inputs, store
from trainyard.artifacts.urls import join
from trainyard.corpus.indexed import IndexedWriter
from trainyard.errors import ConfigError
from trainyard.retrieval.chunk_database import ChunkDatabase
from trainyard.retrieval.index_document import ADDED
from trainyard.retrieval.neighbors import Neighbors
from trainyard.retrieval.project import Project
from trainyard.retrieval.vectors import DATASET, EmbeddingBlocks

ROWS = 1 << 16
"""Vectors, or chunks with their neighbours, that are copied at once."""


def write_guides(
    config: RetroExportConfig, stage: StageRun, project: Project, tables: Mapping[str, Neighbors]
) -> dict[str, Any]:
    """Write whatever of it the project has, and the embeddings."""
    blocks = EmbeddingBlocks.find(stage.inputs["embeddings"].files, config.embeddings_url())
    count = len(ChunkDatabase(project.database))
    if blocks.num_vectors != count:
        raise ConfigError(
            f"--embeddings {config.embeddings_url()} holds {blocks.num_vectors:,} vectors, and "
            f"the database has {count:,} chunks; give those of --chunks train"
        )
    _write_embeddings(stage, blocks, f"{config.name}_bert_embeddings.h5")
    index, record = join(project.index, ADDED), inputs.read_folder(project.index).get(ADDED)
    if store.exists(index):
        copy_file(stage, index, f"{config.name}.index", record)
    for split, table in tables.items():
        middle = "" if split == "train" else f"{split}_"
        _write_neighbors(stage, table, f"{config.name}_{middle}neighbors_text_document")
    return {"vectors": blocks.num_vectors, **{f"{s}_chunks": len(t) for s, t in tables.items()}}


def _write_embeddings(stage: StageRun, blocks: EmbeddingBlocks, name: str) -> None:
    path = stage.scratch / "embeddings.h5"
    with (
        stage.progress(blocks.num_vectors, "vectors", "embeddings") as progress,
        h5py.File(path, "w", libver="earliest") as file,
    ):
        shape = (blocks.num_vectors, blocks.dimensions)
        data = file.create_dataset(DATASET, shape, np.float32, track_times=False)
        for start, vectors in blocks.read(ROWS):
            data[start : start + len(vectors)] = vectors
            progress.update(len(vectors))
    copy_file(stage, str(path), name)
    path.unlink()


def _write_neighbors(stage: StageRun, table: Neighbors, name: str) -> None:
    samples = table.document.samples
    per_sample = samples.seq_length // samples.chunk_length
    step = max(ROWS // per_sample, 1) * per_sample
    with stage.open(f"{name}.bin") as tokens, stage.open(f"{name}.idx") as index:
        writer = IndexedWriter(tokens, np.int64)
        for start in range(0, len(table), step):
            ids = table.rows(np.arange(start, min(start + step, len(table))))
            count = len(ids)
            writer.add_flat(
                ids.ravel(), np.full(count, table.k), np.full(count // per_sample, per_sample)
            )
        writer.write_index(index)
