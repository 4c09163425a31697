"""A whole Retro project: corpora, a database, and a table of neighbours from exact search."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tests.trainyard.retrieval.corpora import LENGTH
from tests.trainyard.retrieval.samples import SEQ_LENGTH, Yard, make_yard
from trainyard.artifacts.inputs import resolve
from trainyard.retrieval.neighbors import NeighborsDocument, block_name, write_block
from trainyard.retrieval.project import Project, ProjectConfig, with_neighbors, write_project

K = 3


@dataclass(frozen=True)
class MadeProject:
    """A project, and what was put into it."""

    yard: Yard
    project: Project
    table: NDArray[np.int64]
    """(chunks, K) neighbours of the training samples."""


def make_project(folder: Path) -> MadeProject:
    """A project whose table names the nearest chunks, and none for the last chunk."""
    yard = make_yard(folder)
    vocabulary = str(folder / "vocab.txt")
    config = ProjectConfig(
        retro_gpt_data_path=tuple(yard.options["data_path"]),
        retro_gpt_split=yard.options["split"],
        retro_gpt_train_samples=24,
        retro_gpt_eval_interval=1000,
        retro_gpt_eval_iters=1,
        retro_gpt_tokenizer_type="ByteLevelTokenizer",
        retro_gpt_seq_length=SEQ_LENGTH,
        retro_gpt_global_batch_size=4,
        retro_gpt_chunk_length=LENGTH,
        retro_bert_tokenizer_type="BertWordPieceLowerCase",
        retro_bert_vocab_file=vocabulary,
    )
    project = with_neighbors(Project(str(folder), config), "train", "train_1")
    write_project(project)
    gaps = ((yard.vectors()[:, None] - yard.database_vectors()[None]) ** 2).sum(axis=2)
    table = np.argsort(gaps, axis=1, kind="stable")[:, :K]
    distances = np.take_along_axis(gaps, table, axis=1)
    table[-1], distances[-1] = -1, np.inf
    at = folder / "query/train_1"
    at.mkdir(parents=True)
    write_block(at / block_name(0, len(table), len(table)), table, distances)
    document = NeighborsDocument(
        samples=yard.chunks().identity(),
        num_chunks=len(table),
        num_neighbors=K,
        database_digest=resolve("retro_db", (project.database,)).digest,
        index_digest="",
        num_neighbors_query=K,
        nprobe=1,
        ef_search=1,
        mean_neighbors=float(K),
        share_fewer=0.0,
        share_none=0.0,
    )
    (at / "neighbors.json").write_text(json.dumps(document.to_document()))
    return MadeProject(yard, project, table)
