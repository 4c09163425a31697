"""A table of neighbours of an old project, which does not say whose samples it is of.

Megatron-LM drops every chunk of a sample's own documents. So in a table of other samples, or of
another order, chunks of own documents turn up: the leak test finds the mistake."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from stages.runtime.context import StageRun
from stages.runtime.finished_files import finish_file, finished_file, move_file
from trainyard.artifacts.urls import join
from trainyard.retrieval.chunk_database import NO_CHUNK, ChunkDatabase
from trainyard.retrieval.leak_test import check_neighbors
from trainyard.retrieval.megatron_neighbors import MegatronNeighbors
from trainyard.retrieval.neighbors import DOCUMENT, NeighborsDocument, block_name, write_block
from trainyard.retrieval.pretraining_chunks import PretrainingChunks
from trainyard.retrieval.project import Project

NUM_QUERY, EF_SEARCH = 200, 256
"""Megatron-LM's defaults."""

ADVICE = (
    "so the table is of other samples: compare config.json with the options that it was made with, "
    "and the token files with those of that time"
)


@dataclass(frozen=True, slots=True)
class CheckedTable:
    """A table of the samples that config.json describes."""

    blocks: MegatronNeighbors
    document: NeighborsDocument
    """Without the digests of database and index."""

    def write(self, stage: StageRun, folder: str, database: str, index: str) -> None:
        """Write blocks and document into a folder of the output."""
        num_chunks = self.document.num_chunks
        with stage.progress(num_chunks, "chunks", folder) as progress:
            for start, stop, name in self.blocks.blocks:
                key = f"{folder.replace('/', '-')}-{start:015d}"
                if finished_file(stage, key) is None:
                    path = stage.scratch / "block.hdf5"
                    write_block(path, *self.blocks.read(start, stop, name))
                    target = join(folder, block_name(start, stop, num_chunks))
                    finish_file(stage, key, move_file(stage, path, target), {})
                progress.update(stop - start)
        bound = replace(self.document, database_digest=database, index_digest=index)
        stage.write_json(join(folder, DOCUMENT), bound.to_document())


def check_table(
    project: Project,
    split: str,
    database: ChunkDatabase,
    pairs: list[tuple[int, int]],
    nprobe: int,
) -> CheckedTable:
    """Raises ArtifactError or DataError for a table that is not of these samples.

    pairs: (dataset of the samples, dataset of the database) with the same documents."""
    config = project.config
    chunks = PretrainingChunks.open(
        project.data(),
        split,
        seq_length=config.retro_gpt_seq_length,
        seed=config.retro_gpt_seed,
        sizes=config.sizes(),
        chunk_length=config.retro_gpt_chunk_length,
    )
    blocks = MegatronNeighbors(project.neighbors(split), len(chunks))
    held = fewer = none = 0
    for start, stop, name in blocks.blocks:
        ids, _ = blocks.read(start, stop, name)
        advice = f"{join(blocks.url, name)}: {ADVICE}"
        check_neighbors(ids, start, chunks, database, pairs, advice=advice)
        counts = np.count_nonzero(ids != NO_CHUNK, axis=1)
        held += int(counts.sum())
        fewer += int((counts < blocks.k).sum())
        none += int((counts == 0).sum())
    document = NeighborsDocument(
        samples=chunks.identity(),
        num_chunks=len(chunks),
        num_neighbors=blocks.k,
        database_digest="",
        index_digest="",
        num_neighbors_query=config.retro_query_num_neighbors_query or NUM_QUERY,
        nprobe=config.retro_query_nprobe or nprobe,
        ef_search=config.retro_query_ef_search or EF_SEARCH,
        mean_neighbors=round(held / len(chunks), 6),
        share_fewer=round(fewer / len(chunks), 6),
        share_none=round(none / len(chunks), 6),
    )
    return CheckedTable(blocks, document)
