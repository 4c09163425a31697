"""The index of an old project, and the documents about it that its stages need."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trainyard.artifacts import inputs, store
from trainyard.artifacts.urls import join, parent
from trainyard.errors import ConfigError
from trainyard.retrieval import index as faiss_index
from trainyard.retrieval.chunk_database import ChunkDatabase
from trainyard.retrieval.index_document import DOCUMENT, IndexDocument, read_index_document
from trainyard.retrieval.megatron_layout import IndexFiles
from trainyard.retrieval.project import INDEX, Project

MEGATRON_NPROBE = 65536
"""Its default of --retro-query-nprobe."""

REASON = "as in the project of Megatron-LM that it was imported from"


@dataclass(frozen=True, slots=True)
class CheckedIndex:
    """An index that can be searched."""

    url: str
    document: IndexDocument
    empty_url: str | None
    """The trained index without vectors."""
    empty: IndexDocument | None


def check_index(
    project: Project, found: IndexFiles, database: ChunkDatabase, scratch: Path
) -> CheckedIndex:
    """Raises ArtifactError for a file that is no index for a database of this size."""
    url = join(project.url, INDEX, found.added)
    index = faiss_index.read(inputs.fetch(url, scratch))
    document = _document(project, found, database, index, url)
    faiss_index.check_described(index, document, url)
    has_all = document.num_vectors == len(database)
    if document.num_vectors > len(database) or (found.add_fraction == 1 and not has_all):
        raise ConfigError(
            f"{url} holds {document.num_vectors:,} vectors, and the database has "
            f"{len(database):,} chunks; choose the index of this database by --retro-index-file"
        )
    empty_url = join(project.url, INDEX, found.empty)
    if not store.exists(empty_url):
        return CheckedIndex(url, document, None, None)
    trained = faiss_index.read(inputs.fetch(empty_url, scratch))
    empty = replace(document, num_vectors=0, add_fraction=1.0, nprobe=1, recall=None)
    faiss_index.check_described(trained, empty, empty_url)
    return CheckedIndex(url, document, empty_url, empty)


def _document(
    project: Project, found: IndexFiles, database: ChunkDatabase, index: Any, url: str
) -> IndexDocument:
    """That of retro_export beside the index, else what the files say."""
    if store.exists(join(parent(url), DOCUMENT)):
        return read_index_document(parent(url))
    facts = faiss_index.facts(index)
    sampled = sum(info.n_chunks_sampled for info in database.infos)
    wanted = project.config.retro_query_nprobe or MEGATRON_NPROBE
    return IndexDocument(
        index_str=found.index_str,
        reason=REASON,
        dimensions=int(index.d),
        num_lists=facts.num_lists,
        code_bytes=facts.code_bytes,
        num_training=int(sampled * found.train_fraction),
        num_vectors=int(index.ntotal),
        add_fraction=found.add_fraction,
        nprobe=max(min(wanted, facts.num_lists), 1),
    )
